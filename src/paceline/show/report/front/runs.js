// The table of runs, for selecting, searching, and sorting by a click on a header.

class RunTable {
  constructor(onToggle) {
    Object.assign(this, {onToggle, by: null, down: true, runs: [], chosen: []});
    this.search = h("input", {type: "search", placeholder: "name, fact or note", "aria-label": "search runs",
      oninput: () => this.#fill()});
    this.head = h("thead");
    this.body = h("tbody");
    this.element = h("div", {id: "runs", hidden: true}, h("h2", {}, "Runs"), h("div", {class: "filters"}, this.search),
      h("div", {class: "scroll"}, h("table", {}, this.head, this.body)));
  }

  draw(runs, chosen) {
    Object.assign(this, {runs, chosen});
    this.element.hidden = runs.length < 2;
    this.#fill();
  }

  // Returns title, sort key and cells of each column.
  #columns() {
    const headlines = [...new Set(this.runs.flatMap(run => Object.keys(run.head.headlines)))];
    return [
      {title: "run", key: run => run.name, cells: run => this.#name(run)},
      {title: "began", key: run => run.head.began ?? 0, cells: ({head}) => [head.began ? dateOf(head.began) : ""]},
      {title: "for", key: run => run.head.seconds ?? 0, cells: ({head}) => [head.seconds ? duration(head.seconds) : ""]},
      {title: "step", key: run => run.head.step ?? 0, cells: ({head}) =>
        [`${head.step ?? 0}${head.total_steps ? ` / ${head.total_steps}` : ""}`]},
      ...headlines.map(title => ({title, key: run => run.head.headlines[title]?.[1] ?? -Infinity, cells: ({head}) => {
        const pair = head.headlines[title];
        return [pair ? `${pair[0].toFixed(3)} → ${pair[1].toFixed(3)}` : ""];
      }})),
      {title: "curve", cells: ({head, colour: stroke}) => [head.spark?.length > 1 ? line(head.spark, stroke) : ""]},
      {title: "state", key: run => run.head.state || run.head.end || "", cells: ({head}) => [head.state || head.end || ""]},
      {title: "", soft: true, cells: ({head}) =>
        [head.note ? h("b", {}, head.note) : "", head.note ? " · " : "", head.facts.join(" · ")]},
    ];
  }

  #fill() {
    const columns = this.#columns(), words = this.search.value.trim().toLowerCase();
    const sorted = columns.find(column => column.title === this.by && column.key);
    const text = ({name, head}) => [name, head.note, ...head.facts].join(" ").toLowerCase();
    const rows = this.runs.filter(run => text(run).includes(words));
    if (sorted) {
      rows.sort((a, b) => (sorted.key(a) < sorted.key(b) ? -1 : 1) * (this.down ? -1 : 1));
    }
    this.head.replaceChildren(h("tr", {}, ...columns.map(({title, key}) => h("th", {}, key ? h("button", {
      class: "small bare", "aria-label": `sort by ${title}`, onclick: () => this.#sort(title)},
    title + (this.by === title ? (this.down ? " ↓" : " ↑") : "")) : title))));
    this.body.replaceChildren(...rows.map(run => h("tr", {}, ...columns.map(column =>
      h("td", column.soft ? {class: "soft"} : {}, ...column.cells(run))))));
  }

  #sort(title) {
    this.down = this.by === title ? !this.down : title !== "run";
    this.by = title;
    this.#fill();
  }

  #name(run) {
    const box = h("input", {type: "checkbox", checked: this.chosen.includes(run.name), "aria-label": run.name,
      onchange: () => this.onToggle(run.name)});
    const swatch = h("i", {class: "swatch"});
    swatch.style.background = run.colour;
    return [box, swatch, h("a", {href: `#${encodeURIComponent(run.name)}`}, run.name)];
  }
}

const dateOf = seconds => new Date(seconds * 1000).toLocaleString("sv").slice(0, 16);

function line(values, stroke) {
  const low = Math.min(...values), high = Math.max(...values);
  const points = values.map((value, i) =>
    `${(i / (values.length - 1) * 100).toFixed(1)},${(18 - (high > low ? (value - low) / (high - low) : 0.5) * 16).toFixed(1)}`);
  const svg = s("svg", {viewBox: "0 0 100 20", preserveAspectRatio: "none", class: "spark small"},
    s("polyline", {points: points.join(" ")}));
  svg.firstChild.style.stroke = stroke;
  return svg;
}
