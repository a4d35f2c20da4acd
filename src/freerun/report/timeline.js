// The timeline: a canvas with a row per rank, an overview below it, one visible stretch of time that both share.

const COLOURS = { forward: "--forward", backward: "--backward", update: "--update", evaluate: "--aside", checkpoint: "--aside" };
const LETTERS = { forward: "F", backward: "B", update: "U", evaluate: "E", checkpoint: "C" };
const MARGIN = 104, AXIS = 26, THIN = 5, OVERVIEW = 5;
const AXIS_FONT = "13px system-ui, sans-serif", CELL_FONT = "12px system-ui, sans-serif";

class Timeline {
  constructor(figure, data) {
    this.figure = figure;
    this.data = data;
    this.lanes = data.lanes.map((lane, n) => ({ ...lane, thin: lane.name !== "compute", spans: data.spans.filter(s => s[0] === n) }));
    this.lanes = this.lanes.filter(lane => lane.spans.length);
    this.total = Math.max(...data.spans.map(s => s[2] + s[3]));
    const ranks = this.lanes.filter(lane => !lane.thin).length;
    this.row = Math.max(14, Math.min(36, Math.floor(640 / Math.max(1, ranks))));
    this.view = this.start();
    this.controls();
    this.canvas = element(figure, "canvas", { tabindex: 0, role: "img", "aria-label": "What every stage did when" });
    this.overview = element(figure, "canvas", { class: "overview", "aria-hidden": "true" });
    this.caption();
    this.pointer();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    onWidth(figure, () => this.draw());
  }

  start() {
    const first = new Map();  // when each microbatch's forward began, at the first rank
    for (const [, name, start, , microbatch] of this.lanes.find(lane => !lane.thin)?.spans || [])
      if (this.data.names[name] === "forward" && !first.has(microbatch)) first.set(microbatch, start);
    const begins = [...first.values()], shown = Math.max(4, Math.floor(this.figure.clientWidth / 125));
    if (begins.length <= shown) return [0, this.total];
    const middle = Math.floor((begins.length - shown) / 2);
    return [begins[middle], begins[middle + shown]];
  }

  controls() {
    const bar = element(this.figure, "div", { class: "bar-above" });
    const named = new Set(this.data.spans.map(s => this.data.names[s[1]]));
    const keys = [["forward", "--forward"], ["backward", "--backward"], ["update", "--update"], ["evaluate", "--aside"],
                  ["checkpoint", "--aside"], ["wait", "hatched"], ["communicate", "--network"]];
    for (const [name, colour] of keys) if (named.has(name)) {
      const key = element(bar, "span", { class: "key" });
      element(key, "i", colour === "hatched" ? { class: "box hatched" } : { class: "box", style: `color:var(${colour})` });
      element(key, "span", {}, name === "wait" ? "waiting" : name);
    }
    const group = element(element(bar, "span", { class: "push" }), "span", { class: "buttons" });
    for (const [text, label, act] of [["−", "Wider", () => this.zoom(2)], ["+", "Closer", () => this.zoom(0.5)],
                                      ["all", "Everything", () => this.show(0, this.total)]]) {
      element(group, "button", { type: "button", "aria-label": label }, text).onclick = act;
    }
  }

  caption() {
    const cut = this.data.leftOut ? ` The first ${this.data.leftOut.toLocaleString("en")} spans are left out.` : "";
    element(this.figure, "figcaption", {}, "Drag to move; click, then turn the wheel to zoom (or Ctrl and wheel); " +
      "arrow keys, + and − work too; double-click shows everything." + cut);
  }

  show(from, to) {
    const length = Math.min(this.total, Math.max(0.02, to - from));
    const left = Math.min(Math.max(0, from), this.total - length);
    this.view = [left, left + length];
    this.draw();
  }

  zoom(factor, share = 0.5) {
    const [from, to] = this.view, at = from + (to - from) * share;
    this.show(at - (at - from) * factor, at + (to - at) * factor);
  }

  pointer() {
    const share = event => (event.offsetX - MARGIN) / (this.canvas.clientWidth - MARGIN);
    let held = null;
    this.canvas.onpointerdown = event => {
      held = { x: event.clientX, view: this.view };
      this.canvas.setPointerCapture(event.pointerId);
      this.canvas.classList.add("moving");
    };
    this.canvas.onpointerup = this.canvas.onpointercancel = () => { held = null; this.canvas.classList.remove("moving"); };
    this.canvas.onpointerleave = hideTip;
    this.canvas.onpointermove = event => {
      if (!held) return this.point(event);
      const [from, to] = held.view, moved = (held.x - event.clientX) / (this.canvas.clientWidth - MARGIN) * (to - from);
      hideTip();
      this.show(from + moved, to + moved);
    };
    this.canvas.addEventListener("wheel", event => {
      if (document.activeElement !== this.canvas && !event.ctrlKey) return;
      event.preventDefault();
      this.zoom(Math.exp(event.deltaY * 0.002), Math.max(0, share(event)));
    }, { passive: false });
    this.canvas.ondblclick = () => this.show(0, this.total);
    this.canvas.onkeydown = event => this.key(event);
    const jump = event => {
      if (!event.buttons) return;
      const half = (this.view[1] - this.view[0]) / 2, at = share(event) * this.total;
      this.show(at - half, at + half);
    };
    this.overview.onpointerdown = this.overview.onpointermove = jump;
  }

  key(event) {
    const step = (this.view[1] - this.view[0]) / 4;
    const moves = {
      ArrowLeft: () => this.show(this.view[0] - step, this.view[1] - step),
      ArrowRight: () => this.show(this.view[0] + step, this.view[1] + step),
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
    };
    if (moves[event.key]) { event.preventDefault(); moves[event.key](); }
  }

  point(event) {
    const lane = this.lanes.find(l => event.offsetY >= l.top && event.offsetY < l.top + l.height);
    const [from, to] = this.view, width = this.canvas.clientWidth - MARGIN;
    const time = from + (event.offsetX - MARGIN) / width * (to - from);
    const span = lane && event.offsetX >= MARGIN && lane.spans.find(s => s[2] <= time && time <= s[2] + s[3]);
    if (!span) return hideTip();
    const [, name, start, length, microbatch, version, update] = span;
    const rows = [["took", milliseconds(length)], ["started at", milliseconds(start)]];
    if (update !== null) rows.unshift(["update", update]);
    if (version !== null) rows.unshift(["version", version]);
    if (microbatch !== null) rows.unshift(["microbatch", microbatch]);
    const what = lane.thin ? `${lane.label}: ${lane.name}` : `${lane.label}: ${this.data.names[name]}`;
    showTip(event, what, rows);
  }

  place(row, thin, gap) {
    let y = AXIS, rank = null;
    for (const lane of this.lanes) {
      if (rank !== null && lane.rank !== rank) y += gap;
      rank = lane.rank;
      lane.top = y;
      lane.height = lane.thin ? thin : row;
      y += lane.height + 1;
    }
    return y + 4;
  }

  draw() {
    if (!this.figure.clientWidth) return;
    const style = getComputedStyle(document.documentElement);
    this.colour = name => style.getPropertyValue(name).trim();
    const height = this.place(this.row, THIN, 7);
    const pen = this.pen(this.canvas, height);
    this.axis(pen, height);
    for (const lane of this.lanes) this.lane(pen, lane, this.view, lane.top, lane.height, true);
    this.drawOverview();
  }

  pen(canvas, height) {
    const ratio = devicePixelRatio || 1, width = this.figure.clientWidth;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = AXIS_FONT;
    pen.textBaseline = "middle";
    return pen;
  }

  axis(pen, height) {
    const [from, to] = this.view, width = this.figure.clientWidth;
    for (const time of linearTicks(from, to, Math.max(2, Math.floor((width - MARGIN) / 110)))) {
      const x = MARGIN + (time - from) / (to - from) * (width - MARGIN);
      pen.fillStyle = this.colour("--line");
      pen.fillRect(x, AXIS - 6, 1, height - AXIS);
      pen.fillStyle = this.colour("--muted");
      pen.textAlign = x > width - 40 ? "right" : x < MARGIN + 20 ? "left" : "center";
      pen.fillText(milliseconds(time), Math.min(x, width), 9);
    }
  }

  lane(pen, lane, view, top, height, detailed) {
    const [from, to] = view, width = this.figure.clientWidth - MARGIN, scale = width / (to - from);
    pen.textAlign = "left";
    if (detailed && !lane.thin) {
      pen.fillStyle = this.colour("--ink");
      pen.fillText(fitted(pen, lane.label, MARGIN - 8), 0, top + height / 2);
    }
    pen.fillStyle = this.colour("--track");
    pen.fillRect(MARGIN, top, width, height);
    pen.save();
    pen.beginPath();
    pen.rect(MARGIN, top, width, height);
    pen.clip();
    const hatch = this.hatch(pen);
    for (const [, number, start, length, microbatch, version, update] of lane.spans) {
      if (start + length < from || start > to) continue;
      const name = this.data.names[number], x = MARGIN + (start - from) * scale, wide = length * scale;
      const gap = detailed && wide > 3 ? 1 : 0;
      pen.fillStyle = name === "wait" ? hatch : this.colour(COLOURS[name] || "--network");
      pen.fillRect(x, top, Math.max(0.5, wide - gap), height);
      if (detailed && !lane.thin && name !== "wait" && height > 13) this.label(pen, name, microbatch, version, update, x, wide, top, height);
    }
    pen.restore();
  }

  label(pen, name, microbatch, version, update, x, wide, top, height) {
    const letter = LETTERS[name], left = Math.max(x, MARGIN) + 3;
    if (!letter) return;
    const what = letter + (microbatch ?? update ?? ""), weights = version === null ? "" : `v${version}`;
    pen.font = CELL_FONT;
    const fits = text => pen.measureText(text).width + 6 < x + wide - left + 3;
    pen.fillStyle = name === "update" ? "#1c2127" : this.colour("--on-span");
    if (weights && height >= 32 && fits(what) && fits(weights)) {
      pen.fillText(what, left, top + height * 0.3);
      pen.fillText(weights, left, top + height * 0.72);
    } else if (weights && fits(`${what}·${weights}`)) pen.fillText(`${what}·${weights}`, left, top + height / 2);
    else if (fits(what)) pen.fillText(what, left, top + height / 2);
  }

  hatch(pen) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const ink = tile.getContext("2d");
    ink.strokeStyle = this.colour("--hatch");
    ink.lineWidth = 1.5;
    ink.beginPath();
    for (const shift of [-6, 0, 6]) { ink.moveTo(shift, 6); ink.lineTo(shift + 6, 0); }
    ink.stroke();
    return pen.createPattern(tile, "repeat");
  }

  drawOverview() {
    const lanes = this.lanes.filter(lane => !lane.thin), height = lanes.length * (OVERVIEW + 1) + 6;
    const pen = this.pen(this.overview, height), width = this.figure.clientWidth - MARGIN;
    lanes.forEach((lane, n) => this.lane(pen, lane, [0, this.total], 3 + n * (OVERVIEW + 1), OVERVIEW, false));
    const [a, b] = this.view.map(time => MARGIN + time / this.total * width);
    pen.fillStyle = this.colour("--paper");
    pen.globalAlpha = 0.62;
    pen.fillRect(MARGIN, 0, a - MARGIN, height);
    pen.fillRect(b, 0, MARGIN + width - b, height);
    pen.globalAlpha = 1;
    pen.strokeStyle = this.colour("--ink");
    pen.lineWidth = 1.5;
    pen.strokeRect(a + 0.75, 0.75, Math.max(2, b - a - 1.5), height - 1.5);
    pen.fillStyle = this.colour("--muted");
    pen.fillText("overview", 0, height / 2);
  }
}

function milliseconds(value) {
  if (Math.abs(value) >= 1000) return `${+(value / 1000).toPrecision(4)} s`;
  return Math.abs(value) >= 0.1 || !value ? `${+value.toPrecision(3)} ms` : `${+(value * 1000).toPrecision(3)} µs`;
}

function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let short = text.replace("stage ", "s").replace(" of replica ", " r").replace("replica ", "r");
  while (short.length > 2 && pen.measureText(short).width > width) short = short.slice(0, -1);
  return short;
}
