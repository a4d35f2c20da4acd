"use strict";
// Curves: one function that draws lines in an SVG of the figure's real size, so that text keeps its size on any screen.

const SVG = "http://www.w3.org/2000/svg";
const X_AXES = {
  update: { title: "updates", show: compact },
  seconds: { title: "wall time", show: clock },
  tokens: { title: "tokens", show: compact },
};
const CHARTS = {
  loss: { title: "loss", height: 380, log: true, show: v => v.toPrecision(4), lines: lossLines },
  speed: { title: "tokens per second", height: 240, zero: true, show: compact, lines: runs => plainLines(runs, "tokens_per_second") },
  rate: { title: "learning rate", height: 220, zero: true, show: compact, lines: runs => plainLines(runs, "lr") },
  gradient: { title: "gradient norm", height: 220, zero: true, show: v => v.toPrecision(3), lines: runs => plainLines(runs, "grad_norm") },
};

function lossLines(runs) {
  return runs.flatMap((run, n) => {
    const many = runs.length > 1, colour = `var(--run${n % 6})`, other = many ? colour : "var(--run1)";
    const lines = [
      { name: run.name, from: run.train, key: "loss", colour, style: "faint", quiet: true },
      { name: many ? run.name : "training, smoothed", from: run.train, key: "smooth", colour },
    ];
    if (run.evaluations.eval_loss.length) {
      lines.push({ name: many ? `${run.name}, evaluation` : "evaluation", from: run.evaluations, key: "eval_loss",
                   colour: other, style: "dashed", dots: true, unlisted: many });
    }
    return lines;
  });
}

function plainLines(runs, key) {
  return runs.map((run, n) => ({ name: run.name, from: run.train, key, colour: `var(--run${n % 6})` }));
}

function compact(value) {
  const size = Math.abs(value);
  const [unit, letter] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]].find(([u]) => size >= u) || [1, ""];
  const shown = value / (letter === "k" ? 1e3 : unit);
  if (size >= 1000 && unit === 1) return Math.round(value).toLocaleString("en");
  return (size && size < 0.01 ? shown.toExponential(1).replace("e-", "e−") : String(+shown.toPrecision(4))) + letter;
}

function clock(seconds) {
  if (seconds < 120) return `${+seconds.toPrecision(3)} s`;
  if (seconds < 7200) return `${+(seconds / 60).toPrecision(3)} min`;
  return seconds < 172800 ? `${+(seconds / 3600).toPrecision(3)} h` : `${+(seconds / 86400).toPrecision(3)} d`;
}

function niceStep(span, count, time) {
  const rough = span / Math.max(1, count);
  if (time) {
    const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
    const step = rough < 1 ? 0 : steps.find(s => s >= rough);
    if (step) return step;
  }
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [[1, 1.5], [2, 3.5], [5, 7.5], [10, Infinity]].find(([, until]) => rough / power < until)[0];
}

function linearTicks(low, high, count, time) {
  if (!(high > low)) return [low];
  const step = niceStep(high - low, count, time), ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) ticks.push(+(n * step).toPrecision(12));
  return ticks;
}

function logTicks(low, high, count) {
  const ticks = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.log10(high); p++)
    for (const m of [1, 2, 3, 5]) if (m * 10 ** p >= low && m * 10 ** p <= high) ticks.push(+(m * 10 ** p).toPrecision(6));
  return ticks.length >= 3 ? ticks : linearTicks(low, high, count);
}

function element(parent, name, attributes = {}, text = "") {
  const made = parent.namespaceURI === SVG || name === "svg" ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(text);
  return parent.appendChild(made);
}

function points(line, x) {
  const values = line.from[line.key];
  return line.from[x].map((at, n) => [at, values[n]]).filter(([at, value]) => at !== null && value !== null);
}

function onWidth(figure, draw) {
  let width = 0;
  const check = () => {
    if (figure.clientWidth === width) return;
    width = figure.clientWidth;
    draw();
  };
  new ResizeObserver(check).observe(figure);
  check();
}

function choices(parent, label, options, chosen, choose) {
  const group = element(parent, "span", { class: "buttons", role: "group", "aria-label": label });
  for (const [value, text] of options) {
    const button = element(group, "button", { type: "button", "aria-pressed": value === chosen }, text);
    button.onclick = () => {
      for (const other of group.children) other.setAttribute("aria-pressed", other === button);
      choose(value);
    };
  }
}

function extent(values) {
  return values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
}

class Chart {
  constructor(figure, runs) {
    this.figure = figure;
    this.kind = CHARTS[figure.dataset.chart];
    const axes = figure.dataset.x.split(",");
    this.x = axes[0];
    this.log = false;
    this.lines = this.kind.lines(runs);
    if (!this.lines.some(line => points(line, this.x).length)) {
      element(figure, "p", { class: "empty" }, "Nothing was recorded.");
      return;
    }
    this.bar(axes);
    this.place = element(figure, "div");
    onWidth(figure, () => this.draw());
  }

  bar(axes) {
    const bar = element(this.figure, "div", { class: "bar-above" });
    const shown = this.lines.filter(line => !line.quiet && !line.unlisted);
    if (shown.length > 1) for (const line of shown) {
      const key = element(bar, "span", { class: "key", style: `color:${line.colour}` });
      element(key, "i", line.dots ? { class: "dot" } : {});
      element(key, "span", {}, line.name);
    }
    const push = element(bar, "span", { class: "push" });
    if (axes.length > 1) choices(push, "Across", axes.map(a => [a, X_AXES[a].title]), this.x, x => { this.x = x; this.draw(); });
    if (this.kind.log) choices(push, "Scale", [[false, "linear"], [true, "log"]], this.log, log => { this.log = log; this.draw(); });
  }

  draw() {
    const width = this.figure.clientWidth, height = this.kind.height;
    if (!width) return;
    const box = { left: 58, right: width - 14, top: 30, bottom: height - 44 };
    this.place.replaceChildren();
    const svg = element(this.place, "svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": this.kind.title });
    this.drawn = this.lines.map(line => ({ ...line, points: points(line, this.x) })).filter(line => line.points.length);
    this.range(box);
    this.axes(svg, box, width);
    const clip = `clip-${this.figure.dataset.chart}-${this.figure.dataset.x}`;
    element(element(svg, "clipPath", { id: clip }), "rect",
            { x: box.left, y: box.top - 3, width: box.right - box.left + 3, height: box.bottom - box.top + 6 });
    const inside = element(svg, "g", { "clip-path": `url(#${clip})` });
    for (const line of this.drawn) this.curve(inside, line);
    this.hover(svg, box);
  }

  range(box) {
    const framing = this.drawn.filter(line => !line.quiet).flatMap(line => line.points);
    const [x0, x1] = extent(this.drawn.flatMap(line => line.points.map(p => p[0])));
    const opening = this.kind.log && !this.log ? x0 + 0.03 * (x1 - x0) : x0;  // a steep start would flatten all the rest
    const late = framing.filter(p => p[0] >= opening && (!this.log || p[1] > 0));
    let [y0, y1] = extent((late.length > 1 ? late : framing).map(p => p[1]));
    if (this.kind.zero) y0 = Math.min(0, y0);
    const [a, b] = this.log ? [Math.log(y0), Math.log(y1)] : [y0, y1], pad = (b - a) * 0.05 || Math.abs(a) * 0.05 || 1;
    const low = this.kind.zero ? a : a - pad, high = b + pad, scale = this.log ? Math.log : v => v;
    this.y = v => box.bottom - (scale(v) - low) / (high - low) * (box.bottom - box.top);
    this.at = v => box.left + (x1 > x0 ? (v - x0) / (x1 - x0) : 0.5) * (box.right - box.left);
    this.xTicks = linearTicks(x0, x1, Math.max(2, Math.floor((box.right - box.left) / 110)), this.x === "seconds");
    const back = this.log ? Math.exp : v => v, count = Math.floor((box.bottom - box.top) / 40);
    this.yTicks = this.log ? logTicks(back(low), back(high), count) : linearTicks(low, high, count);
  }

  axes(svg, box, width) {
    for (const value of this.yTicks) {
      const y = this.y(value);
      element(svg, "line", { class: "grid", x1: box.left, x2: box.right, y1: y, y2: y });
      element(svg, "text", { x: box.left - 10, y: y + 4.5, "text-anchor": "end" }, compact(value));
    }
    for (const value of this.xTicks) {
      const x = this.at(value), anchor = x > width - 30 ? "end" : "middle";
      element(svg, "line", { class: "axis", x1: x, x2: x, y1: box.bottom, y2: box.bottom + 5 });
      element(svg, "text", { x: anchor === "end" ? box.right : x, y: box.bottom + 20, "text-anchor": anchor }, X_AXES[this.x].show(value));
    }
    element(svg, "line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom });
    element(svg, "text", { x: box.right, y: box.bottom + 39, "text-anchor": "end" }, X_AXES[this.x].title + " →");
    element(svg, "text", { x: 0, y: 12 }, "↑ " + this.kind.title);
  }

  curve(parent, line) {
    const visible = line.points.filter(p => !this.log || p[1] > 0);
    const d = visible.map(([x, y], n) => `${n ? "L" : "M"}${this.at(x).toFixed(1)},${this.y(y).toFixed(1)}`).join("");
    element(parent, "path", { d, style: `stroke:${line.colour}`, class: line.style || "" });
    if (line.dots || visible.length === 1) for (const [x, y] of visible) {
      element(parent, "circle", { cx: this.at(x), cy: this.y(y), r: 3.5, style: `fill:${line.colour}` });
    }
  }

  hover(svg, box) {
    const cross = element(svg, "line", { class: "cross", y1: box.top, y2: box.bottom, visibility: "hidden" });
    const leave = () => { hideTip(); cross.setAttribute("visibility", "hidden"); };
    svg.onpointerleave = leave;
    svg.onpointermove = event => {
      const here = event.clientX - svg.getBoundingClientRect().left;
      const anchor = this.drawn.find(line => !line.quiet), [x] = nearest(anchor.points, here, this.at);
      cross.setAttribute("visibility", "visible");
      cross.setAttribute("x1", this.at(x));
      cross.setAttribute("x2", this.at(x));
      const rows = this.drawn.filter(line => !line.quiet).map(line => {
        const y = nearest(line.points, this.at(x), this.at)[1];
        const more = this.kind === CHARTS.loss ? `perplexity ${Math.exp(y).toPrecision(4)}` : "";
        return [line.name, this.kind.show(y), more, line.colour];
      });
      showTip(event, `${X_AXES[this.x].title}: ${X_AXES[this.x].show(x)}`, rows);
    };
  }
}

function nearest(list, pixel, at) {
  let low = 0, high = list.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (at(list[middle][0]) < pixel) low = middle; else high = middle;
  }
  return Math.abs(at(list[low][0]) - pixel) <= Math.abs(at(list[high][0]) - pixel) ? list[low] : list[high];
}

function showTip(event, title, rows) {
  const tip = document.getElementById("tip");
  tip.replaceChildren();
  element(tip, "b", {}, title);
  const table = element(tip, "table");
  for (const [name, value, more, colour] of rows) {
    const row = element(table, "tr");
    element(row, "td", colour ? { style: `color:${colour}` } : {}, name);
    element(row, "td", {}, value);
    if (more) element(row, "td", { class: "muted" }, more);
  }
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 16 + width > innerWidth ? event.clientX - width - 16 : event.clientX + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 16, innerHeight - height - 4))}px`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}
