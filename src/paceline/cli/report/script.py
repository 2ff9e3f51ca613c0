"""The script of the page: values under the pointer, and new sections while `paceline ui` serves it."""

SCRIPT = """
"use strict";
(() => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);

  function nearest(group, x) {
    let best = null, gap = Infinity;
    for (const dot of group.querySelectorAll("circle")) {
      const distance = Math.abs(dot.cx.baseVal.value - x);
      if (distance < gap) { gap = distance; best = dot; }
    }
    return best && best.querySelector("title").textContent;
  }

  function point(event) {
    const svg = event.target instanceof Element ? event.target.closest("svg") : null;
    const box = svg && svg.getBoundingClientRect();
    const x = svg ? (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width : 0;
    const lines = svg ? [...svg.querySelectorAll("g.stroke")].map(group => nearest(group, x)) : [];
    tip.textContent = lines.filter(Boolean).join("\\n");
    tip.hidden = !tip.textContent;
    if (tip.hidden) return;
    const left = event.clientX + 14, top = event.clientY + 14;
    tip.style.left = Math.max(4, Math.min(left, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.max(4, Math.min(top, innerHeight - tip.offsetHeight - 8)) + "px";
  }
  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);

  const nameOf = details => details.querySelector("summary").firstChild.textContent;

  async function renew() {
    const text = await (await fetch(location.href, {cache: "no-store"})).text();
    const page = new DOMParser().parseFromString(text, "text/html");
    const states = new Map();
    for (const details of document.querySelectorAll("details")) states.set(nameOf(details), details.open);
    for (const details of page.querySelectorAll("details")) {
      if (states.has(nameOf(details))) details.open = states.get(nameOf(details));
    }
    document.querySelector("main").replaceWith(page.querySelector("main"));
    document.body.dataset.live = page.body.dataset.live;
  }

  async function look() {
    const now = document.getElementById("now");
    try {
      const answer = await fetch("now", {cache: "no-store"});
      if (!answer.ok) throw new Error(answer.statusText);
      const news = await answer.json();
      now.innerHTML = news.html;
      if (news.stamp !== document.body.dataset.live) await renew();
    } catch (error) {
      now.textContent = "paceline ui does not answer";
    }
    setTimeout(look, 2000);
  }
  if (document.body.dataset.live !== undefined) look();
})();
"""
