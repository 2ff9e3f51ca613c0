// A step's spans: a lane per process, a bar per span. A click on a bar zooms to it.

class Timeline {
  constructor(source, run) {
    Object.assign(this, {source, run, spans: [], zoom: null, step: null});
    this.svg = s("svg", {role: "img", "aria-label": "timeline of a step"});
    this.title = h("span");
    this.picker = h("input", {type: "number", min: "0", "aria-label": "step",
      onchange: () => this.show(Number(this.picker.value))});
    this.reset = h("button", {class: "small", hidden: true, onclick: () => this.#zoom(null)}, "whole step");
    this.list = h("select", {"aria-label": "step", onchange: () => this.show(Number(this.list.value))});
    const steps = source.timelineSteps();
    if (steps) this.list.append(...steps.map(step => h("option", {value: String(step)}, `step ${step}`)));
    const controls = steps ? [this.list] : [
      h("button", {class: "small", onclick: () => this.show(this.step - 1)}, "‹"), this.picker,
      h("button", {class: "small", onclick: () => this.show(this.step + 1)}, "›"),
    ];
    this.element = h("figure", {class: "timeline"},
      h("figcaption", {}, this.title, h("span", {class: "row"}, this.reset, ...controls)), this.svg);
    this.svg.addEventListener("pointerleave", hideTip);
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  // Shows a step's spans; if only some steps have spans, those of the nearest such step.
  async show(step) {
    const steps = this.source.timelineSteps();
    if (steps && steps.length) {
      step = steps.reduce((a, b) => Math.abs(b - step) < Math.abs(a - step) ? b : a);
    }
    this.step = Math.max(0, step);
    this.picker.value = this.list.value = String(this.step);
    this.spans = await this.source.timeline(this.run, this.step);
    this.zoom = null;
    this.draw();
  }

  #zoom(range) {
    this.zoom = range;
    this.draw();
  }

  // Packs a process's spans into up to eight rows without overlaps; the last row takes what does not fit.
  #packed(spans) {
    const ends = [];
    for (const span of spans) {
      let row = ends.findIndex(end => end <= span.start + 1e-6);
      if (row < 0) row = Math.min(ends.length, 7);
      ends[row] = Math.max(ends[row] || 0, span.start + span.seconds);
      span.row = row;
    }
    return ends.length;
  }

  draw() {
    const width = this.svg.clientWidth;
    this.reset.hidden = !this.zoom;
    this.title.replaceChildren(h("b", {}, `Step ${this.step ?? ""}`),
      h("i", {}, this.spans.length ? "a bar for each piece of work; click on one to zoom" : "has no spans"));
    if (!width || !this.spans.length) {
      this.svg.replaceChildren();
      this.svg.setAttribute("height", 0);
      return;
    }
    const end = Math.max(...this.spans.map(span => span.start + span.seconds));
    const [from, to] = this.zoom || [Math.min(0, ...this.spans.map(span => span.start)), end];
    const left = width < 500 ? 4 : 92, right = 8;
    const x = seconds => left + (seconds - from) / (to - from || 1) * (width - left - right);
    const parts = [];
    let top = 4;
    const lanes = Map.groupBy ? Map.groupBy(this.spans, span => span.who) : grouped(this.spans, span => span.who);
    for (const [who, spans] of [...lanes].sort(([a], [b]) => rank(a) - rank(b) || a.localeCompare(b))) {
      const rows = this.#packed(spans), above = left > 50 ? 0 : 16;
      parts.push(s("text", {x: left > 50 ? left - 8 : left, y: top + 13,
        "text-anchor": left > 50 ? "end" : "start", class: "lane"}, who));
      for (const span of spans) {
        const [a, b] = [Math.max(left, x(span.start)), Math.min(width - right, x(span.start + span.seconds))];
        if (b < left || a > width - right) continue;
        const bar = s("rect", {x: a, y: top + above + span.row * 17, width: Math.max(1, b - a), height: 15, rx: 2,
          fill: span.error ? "var(--bad)" : colourOfWord(span.name), class: "span"});
        bar.addEventListener("pointermove", event => this.#tell(event, span));
        bar.addEventListener("pointerdown", event => this.#tell(event, span));
        bar.addEventListener("click", () => this.#zoom([span.start, span.start + span.seconds]));
        parts.push(bar);
        if (b - a > span.name.length * 6.6 + 8) {
          parts.push(s("text", {x: a + 4, y: top + above + span.row * 17 + 11.5, class: "inside"}, span.name));
        }
      }
      top += above + rows * 17 + 8;
    }
    for (const tick of ticksBetween(from, to, Math.max(2, Math.floor(width / 110)))) {
      parts.unshift(s("line", {class: "grid", x1: x(tick), x2: x(tick), y1: 0, y2: top}));
      // The first label would begin left of the picture if names stand above their lanes.
      const anchor = x(tick) < 20 ? "start" : "middle";
      parts.push(s("text", {x: x(tick), y: top + 14, "text-anchor": anchor}, `${short(tick)} s`));
    }
    this.svg.setAttribute("viewBox", `0 0 ${width} ${top + 20}`);
    this.svg.setAttribute("height", top + 20);
    this.svg.replaceChildren(...parts);
  }

  #tell(event, span) {
    showTip(event, h("b", {}, `${span.who} ${span.name}`),
      h("p", {}, `from ${short(span.start)} s, for ${short(span.seconds)} s`),
      ...[span.about, span.error].filter(Boolean).map(text => h("p", {}, text)));
  }
}

const ORDER = ["controller", "rollout", "reward", "learner"];
const rank = who => (ORDER.findIndex(kind => who.startsWith(kind)) + 5) % 5;

function grouped(items, keyOf) {
  const groups = new Map();
  for (const item of items) {
    if (!groups.has(keyOf(item))) groups.set(keyOf(item), []);
    groups.get(keyOf(item)).push(item);
  }
  return groups;
}
