"use strict";
// The tree viewer: one generation, cycle by cycle. Texts of models reach the page as textContent only.
(() => {
  const generations = JSON.parse(document.getElementById("generations-data").textContent);
  const viewer = document.getElementById("viewer");
  if (!viewer || !generations.length) return;

  const SVG = "http://www.w3.org/2000/svg";
  const NODE = 26; // height of a node
  const ROW = 35;
  const [MIN_GAP, MAX_GAP] = [40, 84]; // between columns, for the edges
  const PAD = 18;
  const CHARACTER = 7.45; // of the monospaced font at 12.5 px
  const LONGEST = 16; // characters of a node's text
  const PACE = 1100; // milliseconds a cycle while playing
  const NUMBER = 33; // width of a probability
  const [TOKEN, TEXT, PARENT, PROBABILITY, ACCEPTED, GIVEN] = [0, 1, 2, 3, 4, 5];
  const at = (name) => document.getElementById(`viewer-${name}`);
  const [select, status, box, strip, slider, text, play] = ["select", "status", "box", "strip", "slider", "text", "play"].map(at);

  let generation = generations[0];
  let cycle = 0;
  let timer = null;

  const element = (name, attributes = {}, content = null) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (content !== null) made.textContent = content;
    return made;
  };

  // White space and control characters get a visible form; nothing else changes.
  function visible(raw) {
    if (!raw) return "∅";
    const edge = (spaces) => (spaces.length < 5 ? "·".repeat(spaces.length) : `·×${spaces.length}`);
    return raw
      .replace(/\n/g, "⏎")
      .replace(/\t/g, "⇥")
      .replace(/^ +| +$/g, edge)
      .replace(/⏎ +/g, (found) => `⏎${edge(found.slice(1))}`)
      .replace(/[\u0000-\u001f\u007f-\u009f\u2028\u2029]/g, (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`);
  }

  function shortened(raw) {
    const characters = Array.from(visible(raw));
    return characters.length > LONGEST ? `${characters.slice(0, LONGEST - 1).join("")}…` : characters.join("");
  }

  const spelled = (p) => (p === null ? "" : p >= 0.995 ? "1.0" : p < 0.005 ? "<.01" : p.toFixed(2).slice(1));
  const exact = (p) => (p < 0.01 ? p.toExponential(1) : p.toFixed(2));
  const said = (node) => {
    if (node.p === null) return "";
    return node.given === null ? `, probability ${exact(node.p)}` : `, probability ${exact(node.given)} given the path before, ${exact(node.p)} of the path`;
  };

  // The nodes of one cycle with rows and columns. An accepted child continues its parent's row, as does the likeliest where none is; the
  // others hang below, as close as the outlines of their subtrees allow.
  function arrange(shown) {
    const nodes = shown.nodes.map((node, index) => ({
      index, raw: node[TEXT], token: node[TOKEN], parent: node[PARENT], p: node[PROBABILITY], given: node[GIVEN],
      kind: index === 0 ? "root" : node[ACCEPTED] ? "accepted" : "rejected", children: [],
    }));
    const accepted = nodes.filter((node) => node.kind === "accepted");
    if (nodes.length && shown.emitted.length === accepted.length + 1) {
      const last = accepted.length ? accepted[accepted.length - 1].index : 0;
      const raw = shown.emitted[accepted.length];
      nodes.push({ index: nodes.length, raw, token: null, parent: last, p: null, given: null, kind: "own", children: [] });
    }
    for (const node of nodes) {
      node.depth = node.parent < 0 ? 0 : nodes[node.parent].depth + 1;
      if (node.parent >= 0) nodes[node.parent].children.push(node);
      if (node.depth < 2) node.given = null; // equal to the path's
    }
    const order = { accepted: 0, own: 0, rejected: 1 };
    const outline = (node) => {
      node.children.sort((a, b) => order[a.kind] - order[b.kind] || (b.p ?? 0) - (a.p ?? 0) || a.index - b.index);
      const [tops, bottoms] = [[0], [0]];
      for (const child of node.children) {
        const inner = outline(child);
        child.shift = 0;
        inner.tops.forEach((top, level) => {
          if (bottoms.length > level + 1) child.shift = Math.max(child.shift, bottoms[level + 1] + 1 - top);
        });
        inner.tops.forEach((top, level) => {
          tops[level + 1] = Math.min(tops[level + 1] ?? Infinity, top + child.shift);
          bottoms[level + 1] = inner.bottoms[level] + child.shift;
        });
      }
      return { tops, bottoms };
    };
    if (nodes.length) outline(nodes[0]);
    const widths = [];
    for (const node of nodes) {
      node.row = node.parent < 0 ? 0 : nodes[node.parent].row + node.shift;
      node.label = shortened(node.raw);
      node.number = node.kind === "root" ? "" : spelled(node.p);
      node.condition = spelled(node.given);
      const numbers = (node.number ? NUMBER : 0) + (node.condition ? NUMBER : 0);
      node.width = 20 + CHARACTER * Array.from(node.label).length + numbers;
      widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
    }
    const spare = (box.clientWidth - 2 * PAD - widths.reduce((sum, width) => sum + width, 0)) / Math.max(1, widths.length - 1);
    const gap = Math.min(MAX_GAP, Math.max(MIN_GAP, Math.floor(spare)));
    const columns = [PAD];
    widths.forEach((width, depth) => columns.push(columns[depth] + width + gap));
    for (const node of nodes) [node.x, node.y] = [columns[node.depth], PAD + node.row * ROW];
    const rows = Math.max(0, ...nodes.map((node) => node.row));
    return { nodes, gap, width: columns[columns.length - 1] - gap + PAD, height: 2 * PAD + rows * ROW + NODE };
  }

  function edge(node, parent, gap) {
    const [x0, y0] = [parent.x + parent.width, parent.y + NODE / 2];
    const [x1, y1] = [node.x, node.y + NODE / 2];
    const strength = node.p === null ? 0.35 : Math.sqrt(node.p);
    const d = y0 === y1 ? `M${x0} ${y0}H${x1}` : `M${x0} ${y0}H${x1 - gap}C${x1 - gap * 0.35} ${y0} ${x1 - gap * 0.7} ${y1} ${x1} ${y1}`;
    const drawn = element("path", { class: `edge ${node.kind}`, d, "stroke-width": (1 + 4.5 * strength).toFixed(2) });
    if (node.kind === "rejected") drawn.setAttribute("stroke-opacity", (0.35 + 0.65 * strength).toFixed(2));
    return drawn;
  }

  function drawNode(node) {
    const group = element("g", { class: `node ${node.kind}`, transform: `translate(${node.x} ${node.y})` });
    const token = node.token === null ? "" : ` (token ${node.token})`;
    const words = { root: "the last token before this cycle", accepted: "accepted", rejected: "rejected", own: "the target's own token" };
    const probability = node.kind === "root" ? "" : said(node);
    group.append(element("title", {}, `${JSON.stringify(node.raw)}${token}: ${words[node.kind]}${probability}`));
    group.append(element("rect", { width: node.width, height: NODE, rx: 7 }));
    group.append(element("text", { class: "token", x: 10, y: NODE / 2 }, node.label));
    if (node.condition) group.append(element("text", { class: "given", x: node.width - 8 - NUMBER, y: NODE / 2 }, node.condition));
    if (node.number) group.append(element("text", { class: "number", x: node.width - 8, y: NODE / 2 }, node.number));
    return group;
  }

  function drawTree(shown) {
    const { nodes, gap, width, height } = arrange(shown);
    const path = nodes.filter((node) => node.kind === "accepted");
    const drafts = shown.nodes.length ? shown.nodes.length - 1 : 0;
    const summary = path.length ? `accepted: ${path.map((node) => visible(node.raw)).join(" ")}` : "none accepted";
    const svg = element("svg", {
      viewBox: `0 0 ${width} ${height}`, width, height, role: "img", class: "tree fresh",
      "aria-label": `Draft tree of ${drafts} drafts, ${summary}`,
    });
    const rejectedFirst = [...nodes].sort((a, b) => (a.kind === "rejected" ? 0 : 1) - (b.kind === "rejected" ? 0 : 1));
    for (const node of rejectedFirst) if (node.parent >= 0) svg.append(edge(node, nodes[node.parent], gap));
    for (const node of nodes) svg.append(drawNode(node));
    if (!nodes.length) svg.append(element("text", { class: "number", x: PAD, y: PAD + NODE / 2 }, "no draft in this cycle"));
    box.replaceChildren(svg);
    const lit = nodes.filter((node) => node.kind === "own" || node.kind === "accepted");
    const end = Math.max(0, ...lit.map((node) => node.x + node.width));
    box.scrollLeft = Math.max(0, end + PAD - box.clientWidth);
    box.scrollTop = 0;
    // Drawn unlit first: the style's transition then lights the accepted path.
    requestAnimationFrame(() => requestAnimationFrame(() => svg.classList.remove("fresh")));
  }

  function span(name, content) {
    const made = document.createElement("span");
    made.className = name;
    made.textContent = content;
    return made;
  }

  function drawText() {
    const before = generation.cycles.slice(0, cycle).flatMap((earlier) => earlier.emitted);
    const parts = [span("prompt", generation.prompt), span("earlier", before.join(""))];
    for (const token of generation.cycles[cycle].emitted) {
      const part = span("now", token);
      if (/^\s*$/.test(token)) part.dataset.blank = visible(token);
      parts.push(part);
    }
    text.replaceChildren(...parts);
    const last = parts[parts.length - 1];
    text.scrollTop = Math.max(0, last.offsetTop + last.offsetHeight - text.clientHeight + 14);
  }

  function drawStatus() {
    const lengths = generation.cycles.slice(0, cycle + 1).map((done) => done.emitted.length);
    const mean = lengths.reduce((sum, length) => sum + length, 0) / lengths.length;
    const now = lengths[cycle];
    const parts = [
      ["cycle", String(cycle + 1), ` of ${generation.cycles.length}`],
      ["tokens now", String(now), ""],
      ["tokens per cycle so far", mean.toFixed(2), ""],
    ];
    status.setAttribute("aria-live", timer ? "off" : "polite");
    status.replaceChildren(
      ...parts.map(([name, value, rest]) => {
        const part = span("figure", "");
        part.append(span("name", `${name} `), span("value", value), span("name", rest));
        return part;
      }),
    );
  }

  function show(next) {
    cycle = Math.min(Math.max(next, 0), generation.cycles.length - 1);
    slider.value = String(cycle + 1);
    slider.setAttribute("aria-valuetext", `cycle ${cycle + 1} of ${generation.cycles.length}`);
    viewer.dataset.cycle = String(cycle + 1);
    Array.from(strip.children).forEach((bar, index) => bar.classList.toggle("current", index === cycle));
    drawTree(generation.cycles[cycle]);
    drawText();
    drawStatus();
    for (const name of ["first", "back"]) at(name).disabled = cycle === 0;
    for (const name of ["next", "last"]) at(name).disabled = cycle === generation.cycles.length - 1;
  }

  function pause() {
    if (timer) clearInterval(timer);
    timer = null;
    viewer.classList.remove("playing");
    play.setAttribute("aria-label", "Play");
    drawStatus();
  }

  function start() {
    if (cycle === generation.cycles.length - 1) show(0);
    viewer.classList.add("playing");
    play.setAttribute("aria-label", "Pause");
    timer = setInterval(() => {
      if (cycle === generation.cycles.length - 1) pause();
      else show(cycle + 1);
    }, PACE);
  }

  const toggle = () => (timer ? pause() : start());
  const go = (next) => {
    if (timer) pause();
    show(next);
  };

  function choose(index) {
    generation = generations[index];
    cycle = 0;
    slider.max = String(generation.cycles.length);
    slider.style.setProperty("--cycles", slider.max);
    const most = Math.max(1, ...generation.cycles.map((one) => one.emitted.length));
    strip.replaceChildren(
      ...generation.cycles.map((one, number) => {
        const bar = document.createElement("i");
        bar.style.height = `${Math.max(6, (100 * one.emitted.length) / most)}%`;
        bar.title = `cycle ${number + 1}: ${one.emitted.length}`;
        bar.addEventListener("click", () => go(number));
        return bar;
      }),
    );
    const trees = generation.cycles.map(arrange);
    at("own-key").hidden = !trees.some((tree) => tree.nodes.some((node) => node.kind === "own"));
    at("probability-key").hidden = !trees.some((tree) => tree.nodes.some((node) => node.kind !== "root" && node.p !== null));
    go(0);
  }

  const actions = {
    ArrowLeft: () => go(cycle - 1),
    ArrowRight: () => go(cycle + 1),
    Home: () => go(0),
    End: () => go(generation.cycles.length - 1),
    " ": toggle,
  };
  // Whether a key is the viewer's. Fields and buttons keep theirs, and so does what scrolls elsewhere; keys that scroll the page go on
  // doing so while the viewer is out of sight.
  function mine(key, target) {
    if (target === select || (target === slider && key !== " ")) return false;
    if (viewer.contains(target)) return key !== " " || !target.closest("button");
    if (target.closest("input, select, textarea, button, summary, [contenteditable], .scroll, pre")) return false;
    const { top, bottom } = viewer.getBoundingClientRect();
    return key.startsWith("Arrow") || (bottom > 0 && top < window.innerHeight);
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    if (!Object.hasOwn(actions, event.key) || !mine(event.key, event.target)) return;
    event.preventDefault();
    actions[event.key]();
  });
  at("first").addEventListener("click", actions.Home);
  at("back").addEventListener("click", actions.ArrowLeft);
  at("next").addEventListener("click", actions.ArrowRight);
  at("last").addEventListener("click", actions.End);
  play.addEventListener("click", toggle);
  slider.addEventListener("input", () => go(Number(slider.value) - 1));
  select.addEventListener("change", () => choose(select.selectedIndex));

  generations.forEach((one, index) => select.append(new Option(`${index + 1}. ${one.name}`, String(index))));
  choose(0);
})();
