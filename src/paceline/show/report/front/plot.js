// A chart over steps: lines or a stack, values under the pointer, zoom by dragging, log scale, notes below.

// The state that all charts of the page share.
const view = {range: null, byTime: false, smooth: 0, notes: true, cursor: null, step: null};
const LEVELS = ["info", "warn", "bad"];

class Plot {
  static all = new Set();

  // lines(): [{label, colour, dash, dots, exact, points: [[step, hours, value]]}]; notes(): step -> notes. A chart that
  // folds is hidden while none of its lines moves.
  constructor({title, note = "", lines, notes = () => new Map(), stack = false, height = 200, onStep = null,
    folds = false}) {
    Object.assign(this, {title, lines, notes, stack, height, onStep, folds, log: false, hidden: new Set(), drawn: []});
    this.svg = s("svg", {role: "img", "aria-label": title});
    this.legend = h("div", {class: "legend"});
    this.logButton = h("button", {class: "small", title: "logarithmic scale", "aria-pressed": "false",
      onclick: () => this.toggleLog()}, "log");
    this.element = h("figure", {},
      h("figcaption", {}, h("span", {}, h("b", {}, title), h("i", {}, note)), stack ? null : this.logButton),
      this.svg, this.legend);
    this.svg.addEventListener("pointermove", event => this.#move(event));
    this.svg.addEventListener("pointerdown", event => this.#down(event));
    this.svg.addEventListener("pointerup", event => this.#up(event));
    this.svg.addEventListener("pointerleave", () => { Plot.setCursor(null); hideTip(); });
    this.svg.addEventListener("dblclick", () => Plot.zoom(null));
    new ResizeObserver(() => this.draw()).observe(this.element);
    Plot.all.add(this);
  }

  static zoom(range) {
    view.range = range;
    Plot.drawAll();
    document.dispatchEvent(new Event("zoomed"));
  }

  static drawAll() {
    for (const plot of Plot.all) {
      if (plot.element.isConnected) plot.draw(); else Plot.all.delete(plot);
    }
  }

  static setCursor(x) {
    view.cursor = x;
    for (const plot of Plot.all) plot.drawCursor();
  }

  toggleLog() {
    this.log = !this.log;
    this.logButton.setAttribute("aria-pressed", String(this.log));
    this.draw();
  }

  get folded() {
    return this.folds && this.drawn.length > 0
      && this.drawn.every(({points}) => points.length > 1 && points.every(point => point[2] === points[0][2]));
  }

  unfold() {
    this.folds = false;
    this.draw();
  }

  draw() {
    const place = view.byTime ? 1 : 0;
    this.drawn = this.lines().filter(line => line.points.length);
    this.element.hidden = !this.drawn.length || this.folded;
    const width = this.svg.clientWidth;
    if (!width) return;
    this.#drawLegend();
    const shown = this.drawn.filter(line => !this.hidden.has(line.label));
    const xs = shown.flatMap(({points}) => [points[0][place], points.at(-1)[place]]);
    const x = view.range ? [...view.range] : [Math.min(...xs), Math.max(...xs)];
    if (!xs.length || !(x[1] > x[0])) x[1] = x[0] + 1;
    if (!xs.length) { x[0] = 0; x[1] = 1; }
    if (this.stack && !view.range) this.#widen(x, shown, place);
    const curves = shown.map(line => ({...line, inside: this.#inside(line.points, place, x)}));
    const y = this.stack ? [0, this.#stackTop(curves)] : this.#span(curves);
    const log = this.log && y[0] > 0;
    const ticks = log ? logTicks(...y) : ticksBetween(y[0], y[1], 5);
    // A digit takes at most 6.5 pixels.
    const left = Math.max(46, 10 + 6.5 * Math.max(0, ...ticks.map(tick => short(tick).length)));
    const size = {left, right: 10, top: 8, bottom: 24, width, height: this.height};
    const inner = [size.width - size.left - size.right, size.height - size.top - size.bottom];
    const toY = log ? value => Math.log(value / y[0]) / Math.log(y[1] / y[0]) : v => (v - y[0]) / (y[1] - y[0]);
    this.scale = {
      place, range: x,
      x: value => size.left + (value - x[0]) / (x[1] - x[0]) * inner[0],
      y: value => size.top + inner[1] * (1 - toY(value)),
      back: px => x[0] + (px - size.left) / inner[0] * (x[1] - x[0]),
      size, log,
    };
    this.svg.setAttribute("height", this.height);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.overlay = s("g");
    this.svg.replaceChildren(
      ...this.#axes(x, ticks), ...(view.notes ? this.#marks() : []),
      ...(this.stack ? this.#layers(curves) : curves.flatMap(line => this.#curve(line))), this.overlay);
    this.drawCursor();
  }

  // Adds half a bar on either side.
  #widen(x, lines, place) {
    const half = (x[1] - x[0]) / Math.max(1, ...lines.map(line => line.points.length - 1)) / 2;
    if (lines[0]?.points[0][place] > x[0] - half) x.splice(0, 2, x[0] - half, x[1] + half);
  }

  #inside(points, place, [low, high]) {
    let first = points.findIndex(point => point[place] >= low), last = points.length;
    while (last > 0 && points[last - 1][place] > high) last -= 1;
    if (first < 0) first = points.length;
    // Includes a neighbour on either side, so that lines reach the edge.
    return points.slice(Math.max(0, first - 1), last + 1);
  }

  #span(curves) {
    let low = Infinity, high = -Infinity;
    for (const {inside} of curves) {
      for (const point of inside) {
        if (this.log && point[2] <= 0) continue;
        low = Math.min(low, point[2]);
        high = Math.max(high, point[2]);
      }
    }
    if (low > high) return [0, 1];
    if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) {
      const pad = Math.abs(high) * 0.1 || 1;
      return this.log ? [low / 2, high * 2] : [low - pad, high + pad];
    }
    return this.log ? [low / 1.1, high * 1.1] : [low - (high - low) * 0.05, high + (high - low) * 0.05];
  }

  #axes(x, yTicks) {
    const {size} = this.scale, parts = [];
    for (const tick of yTicks) {
      const at = this.scale.y(tick);
      parts.push(s("line", {class: "grid", x1: size.left, x2: size.width - size.right, y1: at, y2: at}),
        s("text", {x: size.left - 6, y: at + 4, "text-anchor": "end"}, short(tick)));
    }
    const ticks = ticksBetween(x[0], x[1], Math.max(2, Math.floor(size.width / 90)));
    for (const tick of ticks) {
      if (!view.byTime && !Number.isInteger(tick)) continue;
      parts.push(s("text", {x: this.scale.x(tick), y: size.height - 5, "text-anchor": "middle"},
        view.byTime ? `${short(tick)} h` : short(tick)));
    }
    const base = size.height - size.bottom;
    parts.push(s("line", {class: "axis", x1: size.left, x2: size.width - size.right, y1: base, y2: base}));
    return parts;
  }

  // Draws one tick per pixel that has notes, at the level of the worst note.
  #marks() {
    const {size} = this.scale, worst = new Map();
    for (const [step, notes] of this.notes()) {
      const at = this.#xOfStep(step);
      if (at === null || at < size.left || at > size.width - size.right) continue;
      const level = Math.max(...notes.map(note => LEVELS.indexOf(note.level)));
      worst.set(Math.round(at), Math.max(level, worst.get(Math.round(at)) || 0));
    }
    const base = size.height - size.bottom;
    return [...worst].flatMap(([at, level]) => {
      const mark = s("path", {class: `mark ${LEVELS[level]}`, d: `M${at} ${base}l-3 6h6z`});
      if (level < 2) return [mark];
      return [s("line", {class: "mark bad", x1: at, x2: at, y1: size.top, y2: base}), mark];
    });
  }

  #xOfStep(step) {
    if (!view.byTime) return this.scale.x(step);
    const point = (this.drawn[0]?.points || []).find(candidate => candidate[0] >= step);
    return point ? this.scale.x(point[1]) : null;
  }

  #curve(line) {
    const {place, log} = this.scale;
    const points = log ? line.inside.filter(point => point[2] > 0) : line.inside;
    const look = {stroke: line.colour, "stroke-dasharray": line.dash || "none"};
    if (line.dots || points.length === 1) {
      const dots = points.map(p => s("circle", {cx: this.scale.x(p[place]), cy: this.scale.y(p[2]), r: 3,
        fill: line.colour}));
      return [s("path", {class: "line", d: this.#path(points, place), ...look}), ...dots];
    }
    const isSmooth = view.smooth && !line.exact;
    const raw = s("path", {class: isSmooth ? "line raw" : "line", d: this.#path(points, place), ...look});
    if (!isSmooth) return [raw];
    return [raw, s("path", {class: "line", d: this.#path(smoothed(points, view.smooth), place), ...look})];
  }

  #path(points, place) {
    const {size} = this.scale, parts = [];
    for (const [x, y] of thinned(points.map(p => [this.scale.x(p[place]), this.scale.y(p[2])]), size.width)) {
      const at = Math.max(size.left, Math.min(size.width - size.right, x));
      parts.push(`${parts.length ? "L" : "M"}${at.toFixed(1)} ${y.toFixed(1)}`);
    }
    return parts.join("");
  }

  #bins(curves) {
    const {place, range, size} = this.scale, steps = new Map();
    curves.forEach((line, number) => {
      for (const point of line.inside) {
        if (point[place] < range[0] || point[place] > range[1]) continue;
        if (!steps.has(point[0])) steps.set(point[0], {at: point[place], values: curves.map(() => 0)});
        steps.get(point[0]).values[number] = Math.max(0, point[2]);
      }
    });
    const rows = [...steps.values()].sort((a, b) => a.at - b.at);
    const each = Math.max(1, Math.ceil(rows.length / (size.width / 6))), bins = [];
    for (let i = 0; i < rows.length; i += each) {
      const part = rows.slice(i, i + each);
      bins.push({at: part[Math.floor(part.length / 2)].at,
        values: curves.map((_, n) => part.reduce((sum, row) => sum + row.values[n], 0) / part.length)});
    }
    return bins;
  }

  // A tenth of the steps may exceed the top, because one slow step must not flatten all others.
  #stackTop(curves) {
    const totals = new Map();
    for (const line of curves) {
      for (const point of line.inside) totals.set(point[0], (totals.get(point[0]) || 0) + Math.max(0, point[2]));
    }
    const sorted = [...totals.values()].sort((a, b) => a - b);
    const usual = sorted[Math.floor(sorted.length * 0.9)] || 0;
    return (Math.min(sorted.at(-1) || 1, usual * 1.6) || 1) * 1.05;
  }

  #layers(curves) {
    const {size} = this.scale, bins = this.#bins(curves);
    const each = (size.width - size.left - size.right) / Math.max(1, bins.length);
    return curves.map((line, number) => s("g", {fill: line.colour}, ...bins.flatMap(bin => {
      const below = bin.values.slice(0, number).reduce((a, b) => a + b, 0);
      const [bottom, top] = [this.scale.y(below), Math.max(size.top, this.scale.y(below + bin.values[number]))];
      if (bottom - top < 0.05) return [];
      const width = Math.max(0.8, Math.min(each * 0.84, 26));
      return [s("rect", {x: this.scale.x(bin.at) - width / 2, y: top, width, height: bottom - top})];
    })));
  }

  #drawLegend() {
    this.legend.hidden = this.drawn.length < 2;
    this.legend.replaceChildren(...this.drawn.map(line => {
      const key = h("button", {class: this.stack ? "key" : "key lined", "aria-pressed": String(!this.hidden.has(line.label)),
        onclick: () => { this.hidden.delete(line.label) || this.hidden.add(line.label); this.draw(); }},
      this.stack ? "" : s("svg", {class: "stroke", viewBox: "0 0 18 8"}, s("line", {x1: 0, x2: 18, y1: 4, y2: 4,
        stroke: line.colour, "stroke-dasharray": line.dash || "none"})), line.label);
      key.style.setProperty("--key", line.colour);
      return key;
    }));
  }

  drawCursor() {
    if (!this.scale || !this.overlay) return;
    const {size} = this.scale, parts = [], base = size.height - size.bottom;
    const picked = view.step === null ? null : this.#xOfStep(view.step);
    if (picked !== null && picked >= size.left) {
      parts.push(s("path", {class: "picked", d: `M${picked} ${base}l-4 -7h8z`}));
    }
    if (view.cursor !== null) {
      const at = this.scale.x(view.cursor);
      if (at >= size.left && at <= size.width - size.right) {
        parts.push(s("line", {class: "cursor", x1: at, x2: at, y1: size.top, y2: base}));
      }
    }
    if (this.selection) {
      const [from, to] = [...this.selection].sort((a, b) => a - b);
      parts.push(s("rect", {class: "selection", x: from, width: to - from, y: size.top, height: base - size.top}));
    }
    this.overlay.replaceChildren(...parts);
  }

  // Returns the values of the step that is nearest to the pointer, and its notes.
  valuesAt(x) {
    const {place} = this.scale;
    const values = this.drawn.filter(line => !this.hidden.has(line.label))
      .map(line => ({line, point: nearest(line.points, place, x)})).filter(({point}) => point);
    if (!values.length) return null;
    const best = values.reduce((a, b) =>
      Math.abs(b.point[place] - x) < Math.abs(a.point[place] - x) ? b : a).point;
    // A line without a value at that step, such as a validation's, shows its own nearest value with its step.
    return {step: best[0], hours: best[1], values, notes: view.notes ? this.notes().get(best[0]) || [] : []};
  }

  #move(event) {
    if (!this.scale) return;
    const px = event.clientX - this.svg.getBoundingClientRect().left;
    if (this.from !== undefined && event.pointerType === "mouse") this.selection = [this.from, px];
    const at = this.valuesAt(this.scale.back(px));
    if (!at) return;
    Plot.setCursor(view.byTime ? at.hours : at.step);
    const rows = at.values.map(({line, point}) => {
      const swatch = h("i", {class: "swatch"});
      swatch.style.background = line.colour;
      const other = point[0] === at.step ? "" : ` (step ${point[0]})`;
      return h("tr", {}, h("td", {}, swatch, line.label), h("td", {}, short(point[2]), other));
    });
    const notes = at.notes.slice(0, 4).map(note => h("p", {class: note.level}, note.text.slice(0, 140)));
    if (at.notes.length > 4) notes.push(h("p", {}, `and ${at.notes.length - 4} more`));
    const head = view.byTime ? `step ${at.step}, ${short(at.hours)} h` : `step ${at.step}`;
    showTip(event, h("b", {}, head), h("table", {}, ...rows), ...notes);
  }

  #down(event) {
    if (event.pointerType === "mouse") {
      this.from = event.clientX - this.svg.getBoundingClientRect().left;
    } else {
      this.#move(event);
    }
  }

  #up(event) {
    const [from, selection] = [this.from, this.selection];
    this.from = this.selection = undefined;
    const px = event.clientX - this.svg.getBoundingClientRect().left;
    if (selection && Math.abs(px - from) > 8) {
      Plot.zoom([from, px].sort((a, b) => a - b).map(this.scale.back));
    } else if (this.onStep && this.scale) {
      const at = this.valuesAt(this.scale.back(px));
      if (at) this.onStep(at.step);
    }
  }
}

function nearest(points, place, x) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][place] < x) low = middle; else high = middle;
  }
  const [a, b] = [points[low], points[high]];
  return Math.abs(a[place] - x) <= Math.abs(b[place] - x) ? a : b;
}

// Returns an exponential moving average that is not biased towards its first value.
function smoothed(points, weight) {
  let sum = 0, norm = 0;
  return points.map(([step, hours, value]) => {
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return [step, hours, sum / norm];
  });
}

// Keeps the lowest and the highest of several points in one pixel.
function thinned(points, width) {
  if (points.length < 3 * width) return points;
  const kept = [];
  let column = null, low = null, high = null;
  const flush = () => {
    if (low) kept.push(...(low === high ? [low] : low[0] <= high[0] ? [low, high] : [high, low]));
  };
  for (const point of points) {
    if (Math.round(point[0]) !== column) {
      flush();
      [column, low, high] = [Math.round(point[0]), point, point];
    }
    if (point[1] < low[1]) low = point;
    if (point[1] > high[1]) high = point;
  }
  flush();
  return kept;
}
