"use strict";
// Draws the charts of a report, filters and sorts its trials, and follows a run that goes on.
(() => {
  const settings = JSON.parse(document.getElementById("data").textContent);
  let charts = settings.charts;
  const root = document.documentElement;
  const narrow = matchMedia("(max-width: 40rem)");
  const config = {
    responsive: true,
    displaylogo: false,
    showTips: false,
    plotlyServerURL: "",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
  };

  // ---------------------------------------------------------------- charts

  const named = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function colour(value) {
    const found = /^var\((--[a-z0-9]+)\)(?:\/([0-9.]+))?$/.exec(value);
    if (!found) return value;
    const hex = named(found[1]);
    if (!found[2]) return hex;
    const parts = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    return `rgba(${parts.join(",")},${found[2]})`;
  }

  // A copy of a figure in the colours of the page.
  function painted(part, key) {
    if (typeof part === "string") return /color$/.test(key) ? colour(part) : part;
    if (Array.isArray(part)) return part.map((one) => painted(one, ""));
    if (part === null || typeof part !== "object") return part;
    return Object.fromEntries(Object.entries(part).map(([k, v]) => [k, painted(v, k)]));
  }

  function withDefaults(layout, key) {
    const ink = named("--ink");
    const axis = { gridcolor: named("--line"), linecolor: named("--soft"), zeroline: false };
    const axes = Object.fromEntries(
      ["xaxis", "yaxis"].map((name) => [name, { ...axis, ...layout[name] }]),
    );
    return {
      margin: { l: 12, r: 12, t: 8, b: 8 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: narrow.matches ? 11 : 13, color: ink },
      hovermode: "closest",
      hoverlabel: {
        align: "left",
        bgcolor: named("--shade"),
        bordercolor: named("--soft"),
        font: { color: ink },
      },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: named("--soft"), activecolor: ink },
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      autosize: true,
      uirevision: key,
      ...layout,
      ...axes,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", ...layout.legend },
    };
  }

  function draw(key) {
    const chart = document.getElementById(`${key}-chart`);
    const pick = document.getElementById(`${key}-pick`);
    const views = charts[key];
    const place = pick ? Number(pick.value) : 0;
    const figure = painted(views[place] || views[0], "");
    if (figure.layout.scrollable) chart.style.minWidth = `${figure.layout.scrollable}px`;
    delete figure.layout.scrollable;
    const bar = { displayModeBar: narrow.matches ? false : "hover" };
    const layout = withDefaults(figure.layout, `${key}${place}`);
    Plotly.react(chart, figure.data, layout, { ...config, ...bar });
  }

  function drawAll() {
    Object.keys(charts).forEach(draw);
  }

  function prepareCharts() {
    for (const key of Object.keys(charts)) {
      const pick = document.getElementById(`${key}-pick`);
      if (pick) pick.addEventListener("change", () => draw(key));
    }
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  narrow.addEventListener("change", drawAll);

  // On paper: light colours, and charts as wide as the paper, which is not laid out yet.
  function onPaper(wanted) {
    root.classList.toggle("print", wanted);
    drawAll();
    for (const key of Object.keys(charts)) Plotly.Plots.resize(`${key}-chart`);
  }
  addEventListener("beforeprint", () => onPaper(true));
  addEventListener("afterprint", () => onPaper(false));

  // ---------------------------------------------------------------- the table of trials

  const text = (row, column) => row.cells[column].textContent;

  function sortKey(row, column) {
    const data = row.cells[column].querySelector("data");
    const words = text(row, column);
    const number = data ? Number(data.value) : words === "" ? NaN : Number(words);
    return Number.isNaN(number) ? words : number;
  }

  function compare(a, b) {
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return typeof a === "number" ? a - b : a.localeCompare(b);
  }

  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((one) => one.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...table.tBodies[0].rows];
        const keys = new Map(rows.map((row) => [row, sortKey(row, column)]));
        rows.sort((a, b) => (down ? -1 : 1) * compare(keys.get(a), keys.get(b)));
        table.tBodies[0].append(...rows);
      });
    });
  }

  function choice(name, values) {
    const select = document.createElement("select");
    select.append(new Option("all", ""), ...values.map((value) => new Option(value, value)));
    select.dataset.keep = name;
    return select;
  }

  function filterable(table) {
    const rows = [...table.tBodies[0].rows];
    const distinct = (column) => [...new Set(rows.map((row) => text(row, column)))];
    const words = document.createElement("input");
    words.type = "search";
    words.dataset.keep = "words";
    const controls = { Site: choice("Site", distinct(0)), Status: choice("Status", distinct(2)) };
    controls["Text"] = words;
    const found = document.createElement("output");
    const filter = () => {
      const wanted = words.value.toLowerCase();
      let count = 0;
      for (const row of rows) {
        row.hidden = !(
          (!controls.Site.value || text(row, 0) === controls.Site.value) &&
          (!controls.Status.value || text(row, 2) === controls.Status.value) &&
          row.textContent.toLowerCase().includes(wanted)
        );
        count += !row.hidden;
      }
      found.textContent = `${count} of ${rows.length} trials`;
    };
    const form = document.createElement("div");
    form.className = "filter";
    for (const [name, control] of Object.entries(controls)) {
      const label = document.createElement("label");
      label.append(`${name} `, control);
      control.addEventListener("input", filter);
      form.append(label);
    }
    form.append(found);
    table.closest(".wide").before(form);
    filter();
    return filter;
  }

  function prepareTables() {
    return [...document.querySelectorAll("table.trials")].map((table) => {
      sortable(table);
      return filterable(table);
    });
  }

  // ---------------------------------------------------------------- a run that goes on

  let stamp = settings.live ? settings.live.stamp : "";

  function replace(news) {
    const main = document.getElementById("main");
    const open = new Set(
      [...main.querySelectorAll("details[open]")].map((one) => foldName(one)),
    );
    const kept = new Map([...main.querySelectorAll("select, input")].map((one) => [keepName(one), one.value]));
    const focus = document.activeElement && keepName(document.activeElement);
    const scroll = scrollY;
    Object.keys(charts).forEach((key) => Plotly.purge(`${key}-chart`));
    charts = news.charts;
    document.title = news.heading;
    document.querySelector("h1").textContent = news.heading;
    document.getElementById("sections").innerHTML = news.links;
    main.innerHTML = news.main;
    const filters = prepareTables();
    for (const one of main.querySelectorAll("details")) one.open = open.has(foldName(one));
    for (const one of main.querySelectorAll("select, input")) {
      const value = kept.get(keepName(one));
      if (value !== undefined) one.value = value;
      if (one.tagName === "SELECT" && one.selectedIndex < 0) one.selectedIndex = 0;
      if (focus && keepName(one) === focus) one.focus({ preventScroll: true });
    }
    filters.forEach((filter) => filter());
    prepareCharts();
    drawAll();
    scrollTo(0, scroll);
  }

  const keepName = (one) => one.id || (one.dataset && one.dataset.keep) || "";

  function foldName(one) {
    const title = one.querySelector("summary").textContent.replace(/[0-9,]+/g, "");
    const figure = one.closest("figure");
    return `${one.closest("section").id} ${figure ? figure.id : ""} ${title}`;
  }

  async function follow() {
    const state = document.getElementById("state");
    let ended = false;
    let words;
    try {
      const answer = await fetch(`state?seen=${stamp}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(await answer.text());
      const news = await answer.json();
      if (news.main) replace(news);
      stamp = news.stamp;
      ended = news.ended;
      words = news.state;
    } catch (error) {
      words = `No news: ${error.message || error}. Is botorch-fed watch still running?`;
    }
    if (state.textContent !== words) state.textContent = words;
    if (!ended) setTimeout(follow, settings.live.every);
  }

  root.classList.add("js");
  prepareCharts();
  prepareTables();
  drawAll();
  if (settings.live) follow();
})();
