"use strict";

/* Sorting: a click on a column's name sorts by it, numbers from the largest; another click turns the order round. */

for (const head of document.querySelectorAll(".causes thead th")) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...head.childNodes);
  button.addEventListener("click", () => sortBy(head));
  head.append(button);
}

function sortBy(head) {
  const column = head.cellIndex;
  const body = head.closest("table").tBodies[0];
  const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
  const rows = [...body.rows];
  const numeric = rows.every((row) => value(row) !== "" && !Number.isNaN(Number(value(row))));
  const first = numeric ? "descending" : "ascending";
  const order = head.ariaSort !== first ? first : numeric ? "ascending" : "descending";
  const sign = order === "ascending" ? 1 : -1;
  rows.sort((a, b) => sign * (numeric ? value(a) - value(b) : value(a).localeCompare(value(b))));
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.ariaSort = order;
  body.append(...rows);
}

/* The timeline. All plots share one view, so that steps of before and after keep one scale. */

const LANE = { name: 18, host: 40, device: 26, space: 8, inset: 6 };
const TOP = 36;
const LETTER = 6.2;
const MARK_ROOM = 45;
const SHORTEST_VIEW = 2;

function drawTimelines(panel, timelines) {
  const namespace = document.querySelector("svg.patterns").namespaceURI;
  const whole = Math.max(...timelines.map((timeline) => timeline.us));
  const view = { from: 0, to: whole, width: 0 };
  const x = (us) => ((us - view.from) / (view.to - view.from)) * view.width;
  const plots = timelines.map(makePlot);
  const readout = panel.querySelector(".readout");
  const nothing = "Point at a block, tap a block or select a block with the arrow keys to see details.";

  panel.hidden = false;
  panel.querySelector(".plots").append(...plots.map((plot) => plot.element));
  readout.textContent = nothing;
  const actions = {
    left: () => pan(-0.25),
    right: () => pan(0.25),
    in: () => zoom(0.5),
    out: () => zoom(2),
    all: () => look(0, whole),
  };
  for (const button of panel.querySelectorAll("[data-do]")) button.addEventListener("click", actions[button.dataset.do]);
  for (const radio of panel.querySelectorAll("[name=shown]")) {
    radio.addEventListener("change", () => {
      for (const plot of plots) plot.element.hidden = radio.value !== "both" && radio.value !== plot.name;
    });
  }
  new ResizeObserver(redraw).observe(panel);

  function node(name, attributes = {}, ...children) {
    const made = document.createElementNS(namespace, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function makePlot(timeline) {
    const element = document.createElement("div");
    element.className = "plot";
    if (timeline.name) {
      const title = document.createElement("p");
      title.className = "plot-name";
      title.textContent = timeline.name;
      element.append(title);
    }
    const plot = { name: timeline.name, element, ticks: node("g"), extent: node("rect", { class: "extent", y: 0 }), lanes: [] };
    let y = TOP;
    const floors = node("g");
    const blocks = node("g");
    for (const lane of timeline.lanes) {
      const height = lane.device ? LANE.device : LANE.host;
      floors.append(
        node("text", { class: "lane-name", x: 0, y: y + 12 }, lane.name),
        node("rect", { class: "floor", x: 0, y: y + LANE.name, width: "100%", height }),
      );
      const items = makeItems(lane, y + LANE.name, height);
      blocks.append(...items.map((item) => item.group));
      plot.lanes.push(items);
      y += LANE.name + height + LANE.space;
    }
    plot.height = y;
    plot.steps = timeline.steps_us.map((us, index) => ({ us, group: makeMark("step", `step ${index + 1}`, 11, TOP - 6, y) }));
    const label = `Timeline${timeline.name && `, ${timeline.name}`}: what host threads and device streams did`;
    plot.svg = node("svg", { role: "group", "aria-label": label, height: y }, floors, plot.ticks, blocks);
    plot.svg.append(...plot.steps.map((step) => step.group), plot.extent);
    plot.lanes.find((items) => items.length)?.[0].group.setAttribute("tabindex", "0");
    listen(plot);
    element.append(plot.svg);
    return plot;
  }

  /* A block inside another starts lower, so that both can be seen and pointed at. */
  function makeItems(lane, top, height) {
    const open = [];
    return [...lane.items].sort((a, b) => a.start_us - b.start_us || b.us - a.us).map((data) => {
      const item = { ...data, lane: lane.name, end: data.start_us + data.us, labelEnd: data.start_us + data.us };
      while (open.length && open.at(-1).end <= item.start_us) open.pop();
      if (open.length) open.at(-1).labelEnd = Math.min(open.at(-1).labelEnd, item.start_us);
      const inset = Math.min(open.length, 3) * LANE.inset;
      open.push(item);
      item.what = lane.device || item.label === item.kind ? item.label : `${item.kind}: ${item.label}`;
      item.rect = node("rect", { class: `part ${item.kind.replaceAll(" ", "-")}`, y: top + inset, height: height - inset });
      item.text = node("text", { y: top + inset + (height - inset) / 2 + 4 });
      const told = `${nameOf(item)}, ${duration(item.us)}${item.where && ` at ${item.where}`}`;
      const attributes = { class: item.critical ? "item critical" : "item", role: "img", tabindex: -1, "aria-label": told };
      item.group = node("g", attributes, item.rect, item.text);
      return item;
    });
  }

  function makeMark(kind, label, y, from, to) {
    return node("g", { class: kind }, node("line", { y1: from, y2: to }), node("text", { x: 3, y }, label));
  }

  function look(from, to) {
    const span = Math.min(Math.max(to - from, SHORTEST_VIEW), whole);
    view.from = Math.min(Math.max(from, 0), whole - span);
    view.to = view.from + span;
    redraw();
  }

  function zoom(factor, at = (view.from + view.to) / 2) {
    look(at - (at - view.from) * factor, at + (view.to - at) * factor);
  }

  function pan(share) {
    const by = share * (view.to - view.from);
    look(view.from + by, view.to + by);
  }

  function redraw() {
    view.width = panel.querySelector(".plots").clientWidth;
    if (!view.width) return;
    panel.querySelector(".range").textContent = `${duration(view.from)} to ${duration(view.to)} of ${duration(whole)}`;
    for (const plot of plots) {
      plot.svg.setAttribute("viewBox", `0 0 ${view.width} ${plot.height}`);
      plot.ticks.replaceChildren(...ticks().map((us) => put(makeMark("tick", duration(us), 26, TOP - 6, plot.height), us)));
      for (const step of plot.steps) put(step.group, step.us);
      for (const item of plot.lanes.flat()) drawItem(item);
      drawExtent(plot);
    }
  }

  function put(mark, us) {
    const left = x(us);
    mark.setAttribute("transform", `translate(${left})`);
    mark.style.display = left < 0 || left > view.width ? "none" : "";
    mark.lastChild.style.display = left > view.width - MARK_ROOM ? "none" : "";
    return mark;
  }

  function drawItem(item) {
    const left = x(item.start_us);
    const right = x(item.end);
    const shown = right >= 0 && left <= view.width;
    item.group.style.display = shown ? "" : "none";
    if (!shown) return;
    const from = Math.max(left, -4);
    item.rect.setAttribute("x", from);
    item.rect.setAttribute("width", Math.max(Math.min(right, view.width + 4) - from, 1));
    const start = Math.max(left, 0) + 5;
    const room = Math.floor((Math.min(x(item.labelEnd), view.width) - start - 3) / LETTER);
    item.text.setAttribute("x", start);
    item.text.textContent = item.label.length <= room ? item.label : room > 4 ? `${item.label.slice(0, room - 1)}…` : "";
  }

  /* What is shown below is marked over all lanes: what else happened meanwhile is what the reader looks for. */
  function drawExtent(plot) {
    plot.extent.style.display = plot.shown ? "" : "none";
    if (!plot.shown) return;
    plot.extent.setAttribute("x", x(plot.shown.start_us));
    plot.extent.setAttribute("width", Math.max(x(plot.shown.end) - x(plot.shown.start_us), 1));
    plot.extent.setAttribute("height", plot.height);
  }

  function show(plot, item) {
    for (const other of plots) {
      other.shown?.group.classList.remove("shown");
      other.shown = other === plot ? item : undefined;
    }
    item.group.classList.add("shown");
    const what = document.createElement("strong");
    what.textContent = nameOf(item);
    const where = document.createElement("code");
    where.append(...item.where.split(/(?<=\/)/).flatMap((part) => [part, document.createElement("wbr")]));
    readout.replaceChildren(what, `, ${duration(item.us)}, from ${duration(item.start_us)}, ${item.lane}`, where);
    plots.forEach(drawExtent);
  }

  function listen(plot) {
    const all = () => plot.lanes.flat();
    const itemOf = (event) => {
      const group = event.target.closest(".item");
      return group && all().find((item) => item.group === group);
    };
    const shown = (event) => {
      const item = itemOf(event);
      if (item && item !== plot.shown) show(plot, item);
    };
    plot.svg.addEventListener("pointerover", shown);
    // Not on the SVG: Chromium makes one that listens for focus a tab stop.
    plot.element.addEventListener("focusin", (event) => {
      const item = itemOf(event);
      if (!item) return;
      for (const other of all()) other.group.setAttribute("tabindex", other === item ? "0" : "-1");
      if (item.end < view.from || item.start_us > view.to) {
        const half = (view.to - view.from) / 2;
        look(item.start_us - half, item.start_us + half);
      }
      shown(event);
    });
    plot.svg.addEventListener("keydown", (event) => {
      const key = { "+": actions.in, "-": actions.out, 0: actions.all }[event.key];
      const item = itemOf(event);
      const next = item && neighbour(plot.lanes, item, event.key);
      if (event.ctrlKey || event.metaKey || (!key && !next)) return;
      event.preventDefault();
      key?.();
      if (next) {
        next.group.style.display = "";
        next.group.focus({ preventScroll: true });
      }
    });
    plot.svg.addEventListener("wheel", (event) => {
      const across = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
      const width = plot.svg.clientWidth;
      if (event.ctrlKey || event.metaKey) {
        const at = (event.clientX - plot.svg.getBoundingClientRect().left) / width;
        zoom(Math.exp(event.deltaY * 0.002), view.from + at * (view.to - view.from));
      } else if (Math.abs(across) > Math.abs(event.shiftKey ? 0 : event.deltaY)) {
        pan(across / width);
      } else return;
      event.preventDefault();
    }, { passive: false });
    drag(plot.svg);
  }

  function drag(svg) {
    let last = null;
    svg.addEventListener("pointerdown", (event) => { last = event.clientX; });
    svg.addEventListener("pointermove", (event) => {
      if (last === null || (!svg.classList.contains("dragged") && Math.abs(event.clientX - last) < 4)) return;
      svg.classList.add("dragged");
      svg.setPointerCapture(event.pointerId);
      pan((last - event.clientX) / svg.clientWidth);
      last = event.clientX;
    });
    for (const end of ["pointerup", "pointercancel", "pointerleave"]) {
      svg.addEventListener(end, () => {
        last = null;
        svg.classList.remove("dragged");
      });
    }
  }

  function ticks() {
    const least = ((view.to - view.from) / view.width) * 90;
    const power = 10 ** Math.floor(Math.log10(least));
    const every = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= least);
    const first = Math.ceil(view.from / every);
    return Array.from({ length: Math.floor(view.to / every) - first + 1 }, (_, index) => (first + index) * every);
  }
}

function neighbour(lanes, item, key) {
  const at = lanes.findIndex((items) => items.includes(item));
  const place = lanes[at].indexOf(item);
  if (key === "ArrowLeft" || key === "ArrowRight") return lanes[at][place + (key === "ArrowLeft" ? -1 : 1)];
  if (key === "Home") return lanes[at][0];
  if (key === "End") return lanes[at].at(-1);
  const lane = { ArrowUp: lanes[at - 1], ArrowDown: lanes[at + 1] }[key];
  return lane?.find((other) => other.end > item.start_us) ?? lane?.at(-1);
}

function nameOf(item) {
  return item.critical ? `critical ${item.what}` : item.what;
}

function duration(us) {
  if (us === 0) return "0";
  if (us >= 1000) return `${Number((us / 1000).toFixed(3))} ms`;
  return `${Number(us.toFixed(1))} µs`;
}

const data = document.getElementById("timelines");
if (data) drawTimelines(document.getElementById("timeline"), JSON.parse(data.textContent));
