// The report page: makes a document of the data in #data, and draws its curves.
// All text goes in as text, never as markup. Curves and lanes are SVG, so that style sheet and printer see them.
"use strict";
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const main = make("main");
  const states = { finished: "✓ finished", interrupted: "■ interrupted", running: "● running", stopped: "■ stopped" };
  const TURN = 8; // runs until colours repeat; the next ones have other dashes
  const DASHES = ["", "9 3", "3 2", "9 3 2 3"];

  // ------------------------------------------------------------------------------------------------------ elements

  function put(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (typeof value === "function") node.addEventListener(name, value);
      else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== null));
    return node;
  }
  function make(tag, attributes = {}, ...children) {
    return put(document.createElement(tag), attributes, children);
  }
  function svg(tag, attributes = {}, ...children) {
    return put(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  }
  function styled(node, styles) {
    Object.assign(node.style, styles); // by script: a style attribute is against the page's security policy
    return node;
  }
  function told(value) {
    if (value === null || value === undefined) return "-";
    const size = Math.abs(value);
    if (size >= 1e6 || (size > 0 && size < 1e-4)) return value.toExponential(2);
    if (size >= 1000) return Math.round(value).toLocaleString("en-US");
    return String(+value.toPrecision(4));
  }

  // --------------------------------------------------------------------------------------------------------- blocks

  const opened = new Set(); // tables that are shown to their end, also when they are made anew
  const blocks = {
    facts: ({ rows }) =>
      make("dl", {}, ...rows.flatMap(([label, text]) => [make("dt", {}, label), make("dd", {}, text)])),
    note: ({ text, warn }) => make("p", { class: warn ? "note warn" : "note" }, text),
    table({ name, head, rows, numbers, first, best }, key) {
      const kind = (column) => (numbers.includes(column) ? "number" : null);
      const line = (row, number) =>
        make("tr", {}, ...row.map((cell, column) =>
          column === 0
            ? make("th", { scope: "row", class: kind(column) }, cell)
            : make("td", { class: best[number] === column ? "best" : kind(column) }, cell)));
      const rest = make("tbody", { hidden: !opened.has(key) }, ...rows.slice(first).map((row, at) => line(row, first + at)));
      const titles = head.map((title, column) => make("th", { scope: "col", class: kind(column) }, title));
      const table = make("table", {}, make("caption", {}, name), make("thead", {}, make("tr", {}, ...titles)),
        make("tbody", {}, ...rows.slice(0, first).map(line)), rest);
      const wrapped = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, table);
      if (rows.length <= first) return wrapped;
      const label = () => (rest.hidden ? `Show all ${rows.length}` : `Show the first ${first}`);
      const button = make("button", { type: "button", "aria-expanded": String(!rest.hidden), click() {
        rest.hidden = !rest.hidden;
        rest.hidden ? opened.delete(key) : opened.add(key);
        button.setAttribute("aria-expanded", String(!rest.hidden));
        button.textContent = label();
      } }, label());
      return make("div", {}, wrapped, button);
    },
    parts({ parts }) {
      const whole = parts.reduce((sum, part) => sum + part[3], 0) || 1;
      const piece = ([name, , share, value], at) =>
        styled(make("span", { class: `fill${at}`, title: name }, share >= 8 ? `${share}%` : ""), {
          width: `${(100 * value) / whole}%`,
        });
      return make("div", {},
        make("div", { class: "stack", "aria-hidden": "true" }, ...parts.map(piece)),
        make("ul", { class: "legend" }, ...parts.map(([name, text, share], at) =>
          make("li", {}, make("i", { class: `fill${at}` }), `${name} `, make("b", {}, text), ` ${share}%`))));
    },
    beside({ rows }) {
      const bar = (kind, value, most) =>
        styled(make("i", { class: kind }), { width: `${most > 0 ? Math.max(0.5, (100 * value) / most) : 0}%` });
      return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Predicted beside measured" },
        make("table", { class: "beside" },
          make("thead", {}, make("tr", {}, ...["", "predicted", "measured", "off", ""].map((title, column) =>
            make(column % 4 ? "th" : "td", { scope: column % 4 ? "col" : null, class: "number" }, title)))),
          make("tbody", {}, ...rows.map(([name, predicted, measured, one, other, apart]) => {
            const most = Math.max(predicted, measured);
            return make("tr", {}, make("th", { scope: "row" }, name), make("td", { class: "number" }, one),
              make("td", { class: "number" }, other), make("td", { class: "number" }, apart),
              make("td", { class: "pair", "aria-hidden": "true" }, bar("fill5", predicted, most), bar("fill0", measured, most)));
          }))),
        make("ul", { class: "legend" }, make("li", {}, make("i", { class: "fill5" }), "predicted"),
          make("li", {}, make("i", { class: "fill0" }), "measured")));
    },
    bars({ name, rows }) {
      const most = Math.max(...rows.map((row) => row[1]), 1e-9), each = Math.ceil(rows.length / 24);
      const text = rows.map(([age, share]) => `${age}: ${share} %`).join(", ");
      return make("figure", {}, make("figcaption", {}, name),
        make("div", { class: "bars", role: "img", "aria-label": `${name}: ${text}` }, ...rows.map(([age, share, count], at) =>
          make("div", { title: `${age}: ${share} % (${count})` }, make("small", {}, share >= most / 20 && rows.length <= 20 ? `${Math.round(share)}%` : ""),
            styled(make("i", { class: "fill0" }), { height: `${(120 * share) / most}px` }), make("b", {}, at % each ? "" : age)))));
    },
    lanes,
  };

  // Draws the rows of `draw_timeline`: what was predicted above what was measured, on one axis of time.
  function lanes({ name, panels, kinds }) {
    const readout = make("p", { class: "readout" }, "Point at a box to see what it is.");
    const picture = make("div", { class: "lanes" });
    const end = Math.max(...panels.map((panel) => panel.length)) || 1;
    const UNIT = 30, LEFT = 86;
    function draw() {
      const width = Math.max(360, picture.clientWidth || 1000);
      const at = (ms) => LEFT + (ms / end) * (width - LEFT - 8);
      picture.replaceChildren(...panels.flatMap((panel) => {
        const last = panel.rows[panel.rows.length - 1], height = UNIT * (last.top + last.height) + 6;
        const drawn = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": panel.title });
        for (const row of panel.rows) {
          const top = 3 + UNIT * row.top, high = UNIT * row.height;
          if (row.compute) drawn.append(svg("rect", { class: "idle", x: at(0), y: top, width: at(panel.computed) - LEFT, height: high }));
          if (row.name) drawn.append(svg("text", { class: "row", x: LEFT - 6, y: top + high / 2 }, row.name));
          for (const [start, joined, stop, kind, label, index] of row.boxes) {
            const said = `${label}: ${told(stop - joined)} ms, from ${told(joined)} to ${told(stop)} ms` +
              (joined > start ? `, after ${told(joined - start)} ms of waiting` : "");
            if (joined > start) drawn.append(svg("rect", { class: `${kind} waits`, x: at(start), y: top + 0.35 * high,
              width: at(joined) - at(start), height: 0.3 * high, "data-said": said }));
            const wide = Math.max(at(stop) - at(joined), 1);
            drawn.append(svg("rect", { class: kind, x: at(joined), y: top, width: wide, height: high, "data-said": said }));
            if (index !== null && wide > 6 + 7 * String(index).length)
              drawn.append(svg("text", { class: "box", x: at(joined) + wide / 2, y: top + high / 2 }, String(index)));
          }
        }
        drawn.append(svg("line", { class: "ends", x1: at(panel.length), x2: at(panel.length), y1: 0, y2: height }));
        return [make("h4", {}, panel.title), drawn];
      }));
    }
    picture.addEventListener("pointerover", (event) => {
      if (event.target.dataset.said) readout.textContent = event.target.dataset.said;
    });
    sized.set(picture, draw);
    resizes.observe(picture);
    return make("figure", {}, make("figcaption", {}, name), picture, readout,
      make("ul", { class: "legend" }, ...kinds.map(([kind, title]) => make("li", {}, make("i", { class: kind }), title)),
        make("li", {}, make("i", { class: "idle" }), "idle"), make("li", {}, "numbers are micro-batches")));
  }

  // --------------------------------------------------------------------------------------------------------- curves

  const charts = new Map();
  const sized = new Map(); // elements that are drawn as wide as they are
  const hiddenRuns = new Set();
  let axis = "x", logarithmic = false;
  let view = null; // what is shown of the axis; null is all
  let hover = null; // where on the axis the reader points, and in which chart
  let frame = 0, redraw = false;

  const resizes = new ResizeObserver((entries) => entries.forEach((entry) => sized.get(entry.target)?.()));
  const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
    const chart = [...charts.values()].find((one) => one.plot === entry.target);
    chart.visible = entry.isIntersecting;
    if (chart.visible && chart.stale) chart.draw();
  }), { rootMargin: "200px" });

  // One frame for all that happened since the last: charts out of sight are drawn when they come into it.
  function soon(all) {
    redraw ||= all;
    frame ||= requestAnimationFrame(() => {
      for (const chart of charts.values()) {
        chart.stale ||= redraw;
        if (chart.visible && chart.stale) chart.draw();
        if (chart.visible) chart.point();
      }
      frame = 0;
      redraw = false;
    });
  }
  function whole() {
    const lines = [...charts.values()].flatMap((chart) => chart.shown());
    const from = Math.min(...lines.map((line) => line[axis][0])), to = Math.max(...lines.map((line) => line[axis].at(-1)));
    return lines.length ? [from, to > from ? to : from + 1] : [0, 1];
  }
  function zoom(from, to) {
    const [first, last] = whole(), least = (last - first) / 1e4;
    if (to - from < least) [from, to] = [(from + to - least) / 2, (from + to + least) / 2];
    if (to - from >= last - first) view = null;
    else {
      const moved = Math.max(first - from, 0) + Math.min(last - to, 0);
      view = [from + moved, to + moved];
    }
    soon(true);
  }
  function zoomBy(factor, centre = null) {
    const [from, to] = view ?? whole(), middle = centre ?? (from + to) / 2;
    zoom(middle - (middle - from) * factor, middle + (to - middle) * factor);
  }
  function before(values, bound) { // how many are less
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < bound) low = middle + 1; else high = middle;
    }
    return low;
  }
  function nearest(values, bound) {
    const at = before(values, bound);
    return at > 0 && (at === values.length || bound - values[at - 1] < values[at] - bound) ? at - 1 : at;
  }
  function ticks(low, high, count) {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].find((one) => one * power >= raw) * power, found = [];
    for (let at = Math.ceil(low / step - 1e-9); at * step <= high * (1 + 1e-9); at++) found.push(at * step);
    return found;
  }
  function decades(low, high) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const one of [1, 2, 5]) if (one * 10 ** power >= low && one * 10 ** power <= high) found.push(one * 10 ** power);
    return found;
  }
  function duration(seconds) {
    if (seconds < 120) return `${told(seconds)} s`;
    return seconds < 7200 ? `${told(+(seconds / 60).toFixed(1))} min` : `${told(+(seconds / 3600).toFixed(2))} h`;
  }
  function along(value) {
    return axis === "t" ? duration(value) : Math.round(value).toLocaleString("en-US");
  }

  function chartOf(key) {
    const plot = svg("svg", { class: "plot", tabindex: 0, role: "img" });
    const tip = make("div", { class: "tip", hidden: true, "aria-live": "polite" });
    const title = make("h3"), legend = make("span", { class: "lines" });
    const node = make("div", { class: `chart ${key}` }, make("div", { class: "head" }, title, legend), plot, tip);
    const still = svg("g"), cross = svg("line", { class: "cross", visibility: "hidden" }), chosen = svg("rect", { class: "chosen" });
    const spots = svg("g");
    plot.append(still, chosen, cross, spots);
    let spec, place, scale, drag = null;
    const chart = { node, plot, visible: false, stale: true };

    chart.shown = () => spec.lines.filter((line) => line[axis].length && !hiddenRuns.has(line.run));
    const single = () => page.runs.length === 1;
    const colour = (line) => (single() ? spec.lines.indexOf(line) : line.run) % TURN;
    const dash = (line) => (single() ? "" : DASHES[(line.run + Math.floor(line.run / TURN)) % DASHES.length]);
    const title_of = (line) => [single() ? "" : page.runs[line.run].name, line.name].filter(Boolean).join(", ");

    chart.update = (next) => {
      spec = next;
      title.textContent = spec.title + (spec.unit ? ` (${spec.unit})` : "");
      const names = single() ? spec.lines.filter((line) => line.name) : [];
      legend.replaceChildren(...names.map((line) => make("span", { class: `line${colour(line)}` },
        make("i", { class: line.dots ? "dot" : "" }), line.name)));
      const first = spec.lines.map((line) => `${title_of(line) || spec.title} ${told(line.y[0])} to ${told(line.y.at(-1))}`);
      plot.setAttribute("aria-label", `${spec.title} by step: ${first.join("; ")}. Plus and minus zoom, arrows move.`);
      chart.stale = true;
    };

    chart.draw = () => {
      chart.stale = false;
      const width = Math.max(260, Math.round(plot.clientWidth || 600)), height = key === "loss" ? 270 : 190;
      const [from, to] = view ?? whole(), lines = chart.shown();
      place = { left: 54, right: width - 12, top: 8, bottom: height - 26, from, to };
      const parts = lines.map((line) => {
        const start = Math.max(0, before(line[axis], from) - 1), stop = Math.min(line[axis].length, before(line[axis], to) + 2);
        return { line, xs: line[axis], start, stop };
      });
      const log = logarithmic && key === "loss";
      let [low, high] = bounds(parts, log);
      const y = log
        ? (value) => place.bottom - (Math.log(Math.max(value, low) / low) / Math.log(high / low)) * (place.bottom - place.top)
        : (value) => place.bottom - ((value - low) / (high - low)) * (place.bottom - place.top);
      const x = (value) => place.left + ((value - from) / (to - from)) * (place.right - place.left);
      scale = { x, y };
      const clip = `clip-${key}`;
      const inside = svg("g", { "clip-path": `url(#${clip})` });
      const grid = [svg("clipPath", { id: clip }, svg("rect", { x: place.left - 5, y: 0, width: place.right - place.left + 10, height: place.bottom + 4 }))];
      for (const tick of log ? decades(low, high) : ticks(low, high, key === "loss" ? 6 : 4)) {
        grid.push(svg("line", { class: "grid", x1: place.left, x2: place.right, y1: y(tick), y2: y(tick) }),
          svg("text", { class: "tick", x: place.left - 6, y: y(tick) }, told(tick)));
      }
      for (const tick of ticks(from, to, Math.max(3, Math.floor(width / 110)))) {
        if (axis === "x" && !Number.isInteger(tick)) continue;
        grid.push(svg("line", { class: "mark", x1: x(tick), x2: x(tick), y1: place.bottom, y2: place.bottom + 4 }),
          svg("text", { class: x(tick) > width - 40 ? "tick" : "tick below", x: Math.min(x(tick), width - (x(tick) > width - 40 ? 2 : 0)),
            y: place.bottom + 15 }, along(tick)));
      }
      for (const { line, xs, start, stop } of parts) { // all that is pale below all that is strong
        if (!line.lo) continue;
        const kind = `line${colour(line)}`;
        if (line.hi) inside.append(svg("path", { class: `range ${kind}`,
          d: trace(xs, line.hi, start, stop, x, y) + trace(xs, line.lo, start, stop, x, y, true) + "Z" }));
        else inside.append(svg("path", { class: `each ${kind}`, d: trace(xs, line.lo, start, stop, x, y) }));
      }
      for (const { line, xs, start, stop } of parts) {
        const kind = `line${colour(line)}`;
        inside.append(svg("path", { class: `mean ${line.dots ? "tests " : ""}${kind}`, "stroke-dasharray": dash(line) || null, d: trace(xs, line.y, start, stop, x, y) }));
        if (stop - start === 1 || (line.dots && stop - start <= 60))
          for (let at = start; at < stop; at++) {
            const [across, up] = [x(xs[at]), y(line.y[at])];
            inside.append(up >= 0 ? svg("circle", { class: `dot ${kind}`, cx: across, cy: up, r: 3.2 })
              : svg("path", { class: `dot ${kind}`, d: `M${across - 4} ${place.top + 2}h8l-4 -7z` }, svg("title", {}, `above: ${told(line.y[at])}`)));
          }
      }
      if (axis === "x") (spec.marks ?? []).forEach((steps, run) => hiddenRuns.has(run) || steps.forEach((step) => {
        if (step >= from && step <= to) inside.append(svg("path", { class: "skipped", d: `M${x(step) - 4} ${place.bottom - 9}l8 8m0 -8l-8 8` },
          svg("title", {}, `step ${step} was skipped: its gradients were not finite`)));
      }));
      still.replaceChildren(...grid, inside);
      plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
      plot.dataset.from = from;
      plot.dataset.to = to;
    };

    // The range of the values that are shown; single wild ones, as in warm-up, may lie outside.
    function bounds(parts, log) {
      let low = Infinity, high = -Infinity;
      const steady = parts.filter(({ line }) => !line.dots);
      for (const { line, start, stop } of [...steady, ...parts.filter(({ line }) => line.dots)]) {
        const few = line.dots && steady.length && high > 0 ? 2 * high : Infinity; // a first test must not flatten the rest
        const take = (values, part) => {
          const usable = values.slice(start, stop).filter((value) => value !== null && (!log || value > 0) && value <= few);
          const known = Float64Array.from(usable).sort();
          if (!known.length) return;
          const cut = known.length >= 100 ? Math.floor(part * known.length) : 0;
          low = Math.min(low, known[cut]);
          high = Math.max(high, known[known.length - 1 - cut]);
        };
        take(line.y, 0.002);
        for (const values of [line.lo, line.hi]) if (values) take(values, 0.01);
      }
      if (!(high >= low)) return log ? [0.1, 1] : [0, 1];
      if (log) return high > low ? [low, high * 1.05] : [low / 2, low * 2];
      if (low > 0 && low < 0.4 * high) low = 0;
      const pad = (high - low || Math.abs(high) || 1) * 0.05;
      return [low === 0 ? 0 : low - pad, high + pad];
    }

    function trace(xs, values, start, stop, x, y, backwards = false) {
      let text = "";
      for (let at = 0; at < stop - start; at++) {
        const index = backwards ? stop - 1 - at : start + at;
        if (values[index] === null) continue;
        text += `${text || backwards ? "L" : "M"}${Math.round(10 * x(xs[index])) / 10} ${Math.round(10 * y(values[index])) / 10}`;
      }
      return text;
    }

    chart.point = () => {
      const there = hover !== null && place !== undefined && hover.at >= place.from && hover.at <= place.to;
      cross.setAttribute("visibility", there ? "visible" : "hidden");
      const mine = there && hover.chart === chart;
      tip.hidden = !mine;
      if (!mine) spots.replaceChildren();
      if (!there) return;
      const across = scale.x(hover.at);
      for (const [name, value] of [["x1", across], ["x2", across], ["y1", place.top], ["y2", place.bottom]]) cross.setAttribute(name, value);
      if (!mine) return;
      const rows = [], found = [];
      for (const line of chart.shown()) {
        const at = nearest(line[axis], hover.at), kind = `line${colour(line)}`;
        if (line.y[at] === null) continue;
        const range = line.hi ? ` (${told(line.lo[at])} to ${told(line.hi[at])})` : line.lo ? ` (this step ${told(line.lo[at])})` : "";
        rows.push(make("div", { class: kind }, make("i"), `${title_of(line)} `, make("b", {}, told(line.y[at])), range));
        found.push(svg("circle", { class: `spot ${kind}`, cx: scale.x(line[axis][at]), cy: scale.y(line.y[at]), r: 4 }));
      }
      tip.replaceChildren(make("div", {}, axis === "x" ? `step ${along(hover.at)}` : along(hover.at)), ...rows);
      spots.replaceChildren(...found);
      const part = (across / (place.right + 12)) * 100;
      styled(tip, part > 55 ? { left: "", right: `${100 - part + 2}%` } : { right: "", left: `${part + 2}%` });
    };

    const under = (event) => {
      const box = plot.getBoundingClientRect(), [, , wide] = plot.getAttribute("viewBox").split(" ");
      const across = ((event.clientX - box.left) / box.width) * wide;
      return place.from + (Math.min(Math.max((across - place.left) / (place.right - place.left), 0), 1)) * (place.to - place.from);
    };
    const choose = (one, other) => {
      const [a, b] = [scale.x(Math.min(one, other)), scale.x(Math.max(one, other))];
      for (const [name, value] of [["x", a], ["width", b - a], ["y", place.top], ["height", place.bottom - place.top]]) chosen.setAttribute(name, value);
    };
    const point = (at) => {
      hover = { at, chart };
      soon(false);
    };
    put(plot, {
      pointermove(event) {
        const at = under(event);
        if (drag !== null) choose(drag, at);
        point(at);
      },
      pointerleave() {
        hover = null;
        soon(false);
      },
      pointerdown(event) {
        if (event.button !== 0) return;
        drag = under(event);
        plot.setPointerCapture(event.pointerId);
      },
      pointerup(event) {
        const one = drag, other = under(event);
        drag = null;
        chosen.setAttribute("width", 0);
        if (one !== null && Math.abs(scale.x(one) - scale.x(other)) > 5) zoom(Math.min(one, other), Math.max(one, other));
      },
      pointercancel() {
        drag = null;
        chosen.setAttribute("width", 0);
      },
      dblclick() {
        view = null;
        soon(true);
      },
      wheel(event) { // without a key the page scrolls
        if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
        event.preventDefault();
        zoomBy((event.deltaY || event.deltaX) > 0 ? 1.2 : 1 / 1.2, under(event));
      },
      keydown(event) {
        const side = { ArrowLeft: -1, ArrowRight: 1 }[event.key], [from, to] = view ?? whole();
        if (event.key === "+" || event.key === "=") zoomBy(1 / 1.5, hover?.at);
        else if (event.key === "-") zoomBy(1.5, hover?.at);
        else if (event.key === "0" || event.key === "Escape") zoom(...whole());
        else if (side && event.shiftKey) zoom(from + (side * (to - from)) / 10, to + (side * (to - from)) / 10);
        else if (side) point(Math.min(to, Math.max(from, (hover?.at ?? (from + to) / 2) + (side * (to - from)) / 50)));
        else return;
        event.preventDefault();
      },
      blur() {
        hover = null;
        soon(false);
      },
    }, []);
    sized.set(plot, () => {
      if (Math.abs((place?.right ?? 0) + 12 - plot.clientWidth) > 1) {
        chart.stale = true;
        soon(false);
      }
    });
    resizes.observe(plot);
    seen.observe(plot);
    return chart;
  }

  const grid = make("div", { class: "charts" }), runLegend = make("div", { class: "runs" });
  const curves = make("section", { id: "curves", "aria-labelledby": "curves-title" }, make("h2", { id: "curves-title" }, "Curves"),
    make("div", { class: "tools" },
      make("span", { role: "group", "aria-label": "Zoom" },
        ...[["−", "Zoom out", () => zoomBy(1.6)], ["+", "Zoom in", () => zoomBy(1 / 1.6)], ["Reset", "Show all steps", () => zoom(...whole())]].map(
          ([text, label, click]) => make("button", { type: "button", title: label, "aria-label": label, click }, text))),
      make("label", {}, "over ", make("select", { change(event) {
        axis = event.target.value;
        view = hover = null;
        soon(true);
      } }, make("option", { value: "x" }, "steps"), make("option", { value: "t" }, "training time"))),
      make("label", {}, make("input", { type: "checkbox", change(event) {
        logarithmic = event.target.checked;
        soon(true);
      } }), " log scale of the loss"),
      runLegend),
    make("p", { class: "hint" }, "Drag over a part to zoom into it, double-click for all. Strong lines are running means; pale behind them is every step, or the range of steps that share a point."),
    grid);

  function showCurves() {
    for (const spec of page.charts) {
      if (!charts.has(spec.key)) {
        charts.set(spec.key, chartOf(spec.key));
        grid.append(charts.get(spec.key).node);
      }
      charts.get(spec.key).update(spec);
    }
    for (const [at, spec] of page.charts.entries()) { // in their order, also those that came later
      const { node } = charts.get(spec.key);
      if (grid.children[at] !== node) grid.insertBefore(node, grid.children[at]);
    }
    if (page.runs.length > 1) {
      runLegend.replaceChildren(...page.runs.map((run, number) => make("button", {
        type: "button", class: `line${number % TURN}`, "aria-pressed": String(!hiddenRuns.has(number)), title: "Show or hide this run",
        click(event) {
          hiddenRuns.has(number) ? hiddenRuns.delete(number) : hiddenRuns.add(number);
          event.currentTarget.setAttribute("aria-pressed", String(!hiddenRuns.has(number)));
          soon(true);
        } }, svg("svg", { viewBox: "0 0 26 8", "aria-hidden": "true" }, svg("line", { x1: 0, x2: 26, y1: 4, y2: 4,
          "stroke-dasharray": DASHES[(number + Math.floor(number / TURN)) % DASHES.length] || null })), run.name)));
    }
    soon(true);
  }

  // ------------------------------------------------------------------------------------------------------- document

  const kept = new Map(); // parts of the page by key, with what they were made of
  let tab = 0;

  function part(key, data, build) {
    const text = JSON.stringify(data);
    if (kept.get(key)?.text !== text) kept.set(key, { text, node: build() });
    return kept.get(key).node;
  }
  function arrange(parent, nodes) {
    nodes.forEach((node, at) => parent.children[at] === node || parent.insertBefore(node, parent.children[at] ?? null));
    while (parent.children.length > nodes.length) parent.lastElementChild.remove();
  }
  function tiles(run) {
    return make("ul", { class: "tiles", "aria-label": "Result" }, ...run.tiles.map(([title, value, remark]) =>
      make("li", {}, make("span", {}, title), make("b", {}, value), make("small", {}, remark))));
  }
  function sectionOf(section, number) {
    const id = `${section.key}-${number}`;
    return make("section", { id, "aria-labelledby": `${id}-title` }, make("h2", { id: `${id}-title` }, section.title),
      ...section.blocks.map((block, at) => blocks[block.type](block, `${id}-${at}`)));
  }
  function stateOf(run) {
    return make("span", { class: `state ${run.state}` }, states[run.state] ?? run.state);
  }
  function panelOf(run, number) {
    const panel = kept.get(`panel-${number}`)?.node ?? make("div", { class: "panel" });
    kept.set(`panel-${number}`, { node: panel });
    const several = page.runs.length > 1;
    if (several) put(panel, { role: "tabpanel", id: `run-${number}`, "aria-labelledby": `tab-${number}` }, []);
    panel.hidden = number !== tab;
    const top = several ? [part(`about-${number}`, run, () => make("header", {}, make("h2", {}, run.name), make("p", {}, stateOf(run), ` ${run.about}`),
      ...run.notes.map((text) => blocks.note({ text, warn: true })), tiles(run)))] : [];
    arrange(panel, [...top, ...run.sections.map((section) => part(`${section.key}-${number}`, section, () => sectionOf(section, number)))]);
    return panel;
  }
  function tabs() {
    const list = make("div", { role: "tablist", "aria-label": "Runs" });
    const select = (number) => {
      tab = number;
      [...list.children].forEach((button, at) => {
        button.setAttribute("aria-selected", String(at === tab));
        button.tabIndex = at === tab ? 0 : -1;
      });
      page.runs.forEach((_, at) => (kept.get(`panel-${at}`).node.hidden = at !== tab));
    };
    page.runs.forEach((run, number) => list.append(make("button", {
      type: "button", role: "tab", id: `tab-${number}`, "aria-controls": `run-${number}`, "aria-selected": String(number === tab),
      tabindex: number === tab ? 0 : -1, click: () => select(number),
      keydown(event) {
        const side = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!side) return;
        select((number + side + page.runs.length) % page.runs.length);
        list.children[tab].focus();
      } }, run.name)));
    return list;
  }
  function header() {
    const [run] = page.runs, single = page.runs.length === 1;
    return make("header", {}, make("h1", {}, page.heading),
      ...(single ? [make("p", {}, stateOf(run), ` ${run.about}`), ...run.notes.map((text) => blocks.note({ text, warn: true })), tiles(run)]
        : [make("p", {}, page.runs.map((one) => one.name).join(", "))]));
  }
  function contents() {
    const links = [...main.querySelectorAll("section")].filter((section) => !section.closest("[hidden]"));
    return make("nav", { "aria-label": "Contents" }, ...links.map((section) =>
      make("a", { href: `#${section.id}` }, section.querySelector("h2").textContent)));
  }
  function render() {
    document.title = page.title;
    const single = page.runs.length === 1, head = single ? page.runs[0] : page.runs.map((run) => run.name);
    const panels = page.runs.map(panelOf);
    const parts = [part("header", [page.heading, single ? [head.about, head.notes, head.tiles, head.state] : head], header)];
    if (page.comparison) parts.push(part("comparison", page.comparison, () =>
      make("section", { id: "comparison", "aria-labelledby": "comparison-title" }, make("h2", { id: "comparison-title" }, "Comparison"), blocks.table(page.comparison, "comparison"))));
    if (page.charts.length) parts.push(curves);
    if (!single) parts.push(part("tabs", page.runs.map((run) => run.name), tabs));
    arrange(main, [...parts, ...panels]);
    showCurves();
    if (single) {
      const keys = [...main.querySelectorAll("section")].map((section) => section.id);
      arrange(main, [parts[0], part("contents", keys, contents), ...parts.slice(1), ...panels]);
    }
    foot.textContent = `Made by hybridpar report, ${page.made}`;
  }

  const foot = make("footer");
  document.body.prepend(main, foot);
  render();
  window.addEventListener("beforeprint", () => { // what is out of sight, or in the panel of another run, is printed as well
    charts.forEach((chart) => chart.stale && chart.draw());
    sized.forEach((draw, picture) => picture.childElementCount || draw());
  });
})();
