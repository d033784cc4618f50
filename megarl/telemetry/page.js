// Draws every chart of the page, in the colors of the reader's scheme, and again when that or the width changes.
"use strict";
const charts = JSON.parse(document.getElementById("charts").textContent);
const settings = {responsive: true, displayModeBar: false};

function shade(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function themed(layout) {
  const axis = {gridcolor: shade("--grid"), linecolor: shade("--edge"), zerolinecolor: shade("--grid"), automargin: true,
                exponentformat: "e"};
  const narrow = window.innerWidth < 600;
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: {family: "system-ui, sans-serif", size: narrow ? 11 : 12, color: shade("--soft")},
    margin: {l: 48, r: 14, t: 22, b: 40},
    hovermode: "closest",
    hoverlabel: {namelength: -1},
    ...layout,
    legend: {orientation: "h", x: 0, xanchor: "left", yref: "container", y: 0, yanchor: "bottom", traceorder: "normal"},
    xaxis: {...axis, ...layout.xaxis, title: {standoff: 6, font: {size: 11}, ...(layout.xaxis || {}).title}},
    yaxis: {...axis, ...layout.yaxis},
  };
}

async function draw() {
  let drawn = 0;
  for (const chart of charts) {
    const layout = themed(chart.layout);
    const entries = new Set(chart.data.map((trace) => trace.legendgroup || trace.name)).size;
    if (window.innerWidth < 600 && layout.showlegend !== false && entries > 4) {
      layout.height += 16 * entries;  // a legend is higher where it is narrow
      document.getElementById(chart.name).style.height = `${layout.height}px`;
    }
    await Plotly.react(chart.name, chart.data, layout, settings);
    drawn += 1;
  }
  document.body.dataset.drawn = drawn;
}

window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
