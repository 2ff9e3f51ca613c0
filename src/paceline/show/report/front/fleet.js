// The members of a run with their states and versions, and the usage of the machine's processes and GPUs.

// More members than this scroll in a box, those in trouble first, below a line that counts them.
const MANY_MEMBERS = 24;

class Fleet {
  constructor(run) {
    this.run = run;
    this.history = new Map();
    this.body = h("tbody");
    this.machine = h("div", {class: "machine"});
    this.table = h("table", {}, h("thead", {}, h("tr", {},
      ...["member", "engine", "state", "version", "at work", "starts", "deaths"].map(name => h("th", {}, name)))), this.body);
    this.counts = h("p", {class: "none"});
    this.box = h("div", {class: "scroll"}, this.table);
    this.element = h("section", {id: "fleet"}, h("h2", {}, "Fleet"), this.counts, this.box, this.machine);
  }

  draw(now) {
    const members = new Map(this.run.journal.fleet.map(member => [member.name, {...member}]));
    for (const member of now?.members || []) {
      members.set(member.name, {...members.get(member.name), ...member});
    }
    this.element.hidden = !members.size && !now?.processes?.length;
    const isLarge = members.size > MANY_MEMBERS;
    this.counts.hidden = !isLarge;
    this.counts.textContent = countsOf([...members.values()]);
    this.box.classList.toggle("few", isLarge);
    const place = member => isLarge ? ["bad", "warn", "good", ""].indexOf(stateClass(member.state)) : 0;
    const order = (a, b) => place(a) - place(b) || a.name.localeCompare(b.name, "en", {numeric: true});
    this.body.replaceChildren(...[...members.values()].sort(order).map(member => h("tr", {},
      h("td", {}, member.name), h("td", {}, member.engine || ""),
      h("td", {}, h("span", {class: `state ${stateClass(member.state)}`}, member.state || "–")),
      h("td", {}, member.version === null || member.version === undefined ? "" : `v${member.version}`),
      h("td", {}, member.in_flight ? String(member.in_flight) : ""),
      h("td", {}, String(member.starts ?? "")), h("td", {class: member.deaths ? "bad" : ""}, String(member.deaths || "")),
    )));
    this.#drawMachine(now);
  }

  #drawMachine(now) {
    const gauges = [
      ...(now?.gpus || []).flatMap(gpu => [
        {key: `GPU ${gpu.name} busy`, value: gpu.utilisation, top: 1, text: `${Math.round(gpu.utilisation * 100)} %`},
        {key: `GPU ${gpu.name} memory`, value: gpu.memory_used, top: gpu.memory_total,
          text: `${gib(gpu.memory_used)} of ${gib(gpu.memory_total)} GiB`},
      ]),
      ...(now?.processes || []).flatMap(process => [
        {key: `${process.name} CPU`, value: process.cores, top: null, text: `${process.cores.toFixed(1)} cores`},
        {key: `${process.name} memory`, value: process.bytes, top: null, text: `${gib(process.bytes)} GiB`},
      ]),
    ];
    for (const gauge of gauges) {
      const values = this.history.get(gauge.key) || [];
      this.history.set(gauge.key, [...values, gauge.value].slice(-90));
    }
    this.machine.replaceChildren(...gauges.map(gauge => h("div", {class: "gauge"},
      h("span", {}, gauge.key), h("b", {}, gauge.text), spark(this.history.get(gauge.key), gauge.top))));
  }
}

// Returns for each kind of member how many there are in each state, the most frequent state first.
function countsOf(members) {
  const kinds = new Map();
  for (const member of members) {
    const kind = member.name.replace(/-\d+$/, ""), states = kinds.get(kind) || new Map();
    kinds.set(kind, states.set(member.state || "–", (states.get(member.state || "–") || 0) + 1));
  }
  const inOrder = states => [...states].sort((a, b) => b[1] - a[1]).map(([state, number]) => `${number} ${state}`);
  return [...kinds].map(([kind, states]) => `${kind}: ${inOrder(states).join(", ")}`).join("; ");
}

const gib = bytes => (bytes / 2 ** 30).toFixed(bytes < 2 ** 33 ? 2 : 0);

function stateClass(state) {
  if (["dead", "lost"].includes(state)) return "bad";
  if (["suspect", "stale", "draining", "left"].includes(state)) return "warn";
  return ["serving", "ready", "training", "publishing"].includes(state) ? "good" : "";
}

function spark(values, top) {
  const high = top || Math.max(...values, 1e-9) * 1.1;
  const points = values.map((value, i) => `${(i + 90 - values.length) / 89 * 100},${24 - value / high * 22}`);
  return s("svg", {viewBox: "0 0 100 26", preserveAspectRatio: "none", class: "spark"},
    s("polyline", {points: points.join(" ")}));
}
