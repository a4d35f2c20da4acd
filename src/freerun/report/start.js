// Draw everything on the page, and say on the root element whether that went well.

const root = document.documentElement;
addEventListener("error", event => { root.dataset.error = event.message; });
try {
  const data = JSON.parse(document.getElementById("data").textContent);
  for (const figure of document.querySelectorAll("figure.chart")) new Chart(figure, data.curves);
  const figures = [...document.querySelectorAll("figure.timeline")];
  const timelines = figures.map(figure => new Timeline(figure, data.timelines[figure.dataset.timeline]));
  const shortest = Math.min(...timelines.map(({ view: [from, to] }) => to - from));
  for (const timeline of timelines) timeline.show(timeline.view[0], timeline.view[0] + shortest);  // one scale for all
  root.dataset.ready = "true";
} catch (error) {
  root.dataset.error = String(error);
  throw error;
}
