/* Keeps a view live, shows times in the reader's zone, and draws charts that can be zoomed. */
(() => {
  const view = document.getElementById("view");
  const live = document.getElementById("live");

  const say = (text, kind) => {
    if (live.textContent !== text) live.textContent = text;
    live.className = kind;
  };

  /* Times */
  const MOMENT = {
    year: "numeric", month: "short", day: "numeric", hour: "numeric", minute: "2-digit", second: "2-digit", timeZoneName: "short",
  };
  const zone = () =>
    new Intl.DateTimeFormat(undefined, MOMENT).formatToParts(new Date()).find((part) => part.type === "timeZoneName").value;

  const localTimes = (root) => {
    for (const element of root.querySelectorAll("time[datetime]")) {
      const when = new Date(element.dateTime);
      const text = when.toLocaleString(undefined, MOMENT);
      if (element.textContent !== text) element.textContent = text;
      element.title = element.dateTime;
    }
  };

  /* Charts: a <div class="plot" data-src="..."> whose data is a JSON document of the console. */
  const plots = new Map();
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  /* Points without neighbours, which no line would show. */
  const lonely = (plot, index) => {
    const values = plot.data[index];
    const known = (place) => values[place] !== null && values[place] !== undefined;
    return values.map((_, place) => place).filter((place) => known(place) && !known(place - 1) && !known(place + 1));
  };

  const options = (data, width) => ({
    width,
    height: data.height || 240,
    cursor: { sync: { key: "serin" } },
    legend: { live: true },
    scales: { x: { time: true }, y: data.log ? { distr: 3 } : { range: (_, low, high) => [data.zero ? 0 : low, high || 1] } },
    axes: [
      { stroke: colour("dim"), grid: { stroke: colour("edge"), width: 1 }, ticks: { stroke: colour("edge") } },
      {
        stroke: colour("dim"), grid: { stroke: colour("edge"), width: 1 }, ticks: { stroke: colour("edge") }, size: 64,
        values: (_, values) => values.map((value) => (value === null ? "" : `${Number(value.toPrecision(4))}${data.unit || ""}`)),
      },
    ],
    series: [
      { label: `Time (${zone()})` },
      ...data.series.map((each) => ({
        label: each.label,
        stroke: colour(each.colour),
        width: each.width || 1.6,
        dash: each.dash,
        points: { show: true, size: 5, filter: lonely },
        spanGaps: false,
        value: (_, value) => (value === null || value === undefined ? "-" : `${Number(value.toPrecision(4))}${data.unit || ""}`),
      })),
    ],
  });

  const draw = async (place) => {
    const known = plots.get(place);
    const answer = await fetch(place.dataset.src, { credentials: "same-origin" });
    if (!answer.ok) return;
    const data = await answer.json();
    const width = place.clientWidth;
    if (known && known.fingerprint === data.fingerprint) {
      known.plot.setData(data.columns);
      return;
    }
    if (known) known.plot.destroy();
    place.replaceChildren();
    const plot = new uPlot(options(data, width), data.columns, place);
    plots.set(place, { plot, data, fingerprint: data.fingerprint });
  };

  const drawAll = () => {
    for (const place of [...plots.keys()]) {
      if (!place.isConnected) {
        plots.get(place).plot.destroy();
        plots.delete(place);
      }
    }
    for (const place of document.querySelectorAll(".plot[data-src]")) draw(place).catch(() => {});
  };

  const redraw = () => {
    for (const [place, known] of plots) {
      known.plot.destroy();
      place.replaceChildren();
      known.plot = new uPlot(options(known.data, place.clientWidth), known.data.columns, place);
    }
  };

  document.addEventListener("serin:theme", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let resizing = 0;
  addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => {
      for (const [place, known] of plots) known.plot.setSize({ width: place.clientWidth, height: known.plot.height });
    }, 150);
  });

  /* Live: the stream is closed while nobody sees the page, because a browser opens only a few to one host. */
  document.body.addEventListener("htmx:sseOpen", () => say("live", "on"));
  document.body.addEventListener("htmx:sseError", () => say("not connected; trying again", "off"));
  document.body.addEventListener("htmx:sseMessage", () => {
    localTimes(view);
    drawAll();
  });
  view.addEventListener("sse:ended", () => location.reload());
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      htmx.trigger(view, "htmx:beforeCleanupElement");
      say("paused while this page is hidden", "off");
    } else {
      htmx.trigger(view, "htmx:afterProcessNode");
    }
  });

  /* A morph must not empty what a script has drawn. */
  Idiomorph.defaults.callbacks.beforeNodeMorphed = (old) => !(old.classList && old.classList.contains("plot") && plots.has(old));
  /* Nor close what the reader has unfolded, nor undo what they have chosen or typed. */
  const READERS = ["checked", "selected", "value"];
  Idiomorph.defaults.callbacks.beforeAttributeUpdated = (name, node) =>
    !(name === "open" && node.tagName === "DETAILS") && !(READERS.includes(name) && node.closest("form"));

  localTimes(document);
  drawAll();
})();
