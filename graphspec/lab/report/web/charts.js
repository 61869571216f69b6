"use strict";
// Draws the charts in the colours of the reader's scheme, again when the scheme or the width class changes.
(() => {
  const charts = JSON.parse(document.getElementById("charts-data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 640px)");
  const middling = window.matchMedia("(max-width: 1000px)");
  const options = { displayModeBar: false, responsive: true, showTips: false, doubleClick: false };

  // A colour that names a CSS variable stands for its value; a text that looks like one stays.
  function resolve(value, css, colour = false) {
    if (typeof value === "string") {
      const found = colour && /^var\((--[\w-]+)\)$/.exec(value);
      return found ? css.getPropertyValue(found[1]).trim() : value;
    }
    if (Array.isArray(value)) return value.map((inner) => resolve(inner, css, colour));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, resolve(inner, css, key.includes("color"))]));
    }
    return value;
  }

  // A label that would run out of the chart ends in an ellipsis; tooltips and tables have all of it.
  function cut(text, most) {
    const plain = text.replace(/<[^>]*>/g, "").replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
    if (plain.length <= most) return text;
    return `${plain.slice(0, most - 1)}…`.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  }

  // Names after lines need a wide margin; where that takes too much of the width, a legend below takes their place.
  function fit(data, layout, width) {
    const annotations = layout.annotations || [];
    const direct = annotations.filter((annotation) => annotation.name === "direct");
    if (narrow.matches) layout.margin.l = 4;
    for (const annotation of annotations) if (annotation.name === "row") annotation.text = cut(annotation.text, (width - 24) / 6.7);
    if (!direct.length || layout.margin.r < 0.43 * width) return;
    layout.margin.r = 12;
    layout.annotations = annotations.filter((annotation) => annotation.name !== "direct");
    layout.showlegend = true;
    const breaks = data.filter((trace) => trace.showlegend !== false && (trace.name || "").includes("<br>")).length;
    const extra = 22 * direct.length + 16 * breaks + 14;
    layout.legend = { ...layout.legend, orientation: "v", yref: "container", y: 0, yanchor: "bottom" };
    layout.margin.b += extra;
    layout.height += extra;
  }

  function draw() {
    const css = getComputedStyle(document.documentElement);
    for (const chart of charts) {
      const place = document.getElementById(chart.id);
      const { data, layout } = resolve(structuredClone(chart), css);
      fit(data, layout, place.clientWidth);
      place.style.height = `${layout.height}px`;
      Plotly.react(place, data, layout, options);
    }
  }

  draw();
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
  middling.addEventListener("change", draw);
})();
