/* Applies the reader's choice of colours before the page is drawn. */
(() => {
  const kept = localStorage.getItem("theme");
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const names = { "": "as the system", light: "light", dark: "dark" };
    const next = { "": "dark", dark: "light", light: "" };
    const show = () => {
      const now = document.documentElement.dataset.theme || "";
      button.setAttribute("aria-label", `Colours: ${names[now]}`);
      button.title = `Colours: ${names[now]}`;
      button.textContent = { "": "◐", light: "☀", dark: "☾" }[now];
    };
    button.addEventListener("click", () => {
      const chosen = next[document.documentElement.dataset.theme || ""];
      if (chosen) {
        document.documentElement.dataset.theme = chosen;
        localStorage.setItem("theme", chosen);
      } else {
        delete document.documentElement.dataset.theme;
        localStorage.removeItem("theme");
      }
      show();
      document.dispatchEvent(new CustomEvent("serin:theme"));
    });
    show();
  });
})();
