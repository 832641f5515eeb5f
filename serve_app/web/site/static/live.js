// While a job is open, a part of its page is fetched again and again: the keyboard keeps its place, and the title and
// screen readers say the job's state.
const place = document.title.split(" · ").slice(-2).join(" · "); // the page's name without a job's state
let last; // what had the focus

function tell() {
  const text = document.querySelector("[data-said]")?.dataset.said;
  const told = document.getElementById("said");
  if (!text || told.textContent === text) return;
  told.textContent = text;
  document.title = `${text} · ${place}`;
}

document.addEventListener("focusin", ({ target }) => { last = target; });
document.body.addEventListener("htmx:afterSwap", () => { // htmx itself keeps the focus on what has the same id
  const isLost = document.activeElement === document.body && last && !last.isConnected;
  if (isLost) document.querySelector("[data-said] [tabindex]")?.focus();
  tell();
});
tell();
