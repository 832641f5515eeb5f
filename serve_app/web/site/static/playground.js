// The playground works without this file; with it, examples fill in the prompt, sliders say their value and follow what the
// chosen LoRA wants, words are checked while they are typed, and a new picture is loaded before it takes the place of the
// one before.
const prompt_ = document.getElementById("prompt");
const words = document.getElementById("words");

for (const link of document.querySelectorAll(".examples a")) {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    prompt_.value = link.textContent;
    prompt_.focus();
    check();
  });
}

for (const slider of document.querySelectorAll("input[type=range]")) {
  const shown = document.querySelector(`output[for=${slider.id}]`);
  const say = () => { shown.textContent = slider.value; };
  slider.addEventListener("input", say);
  say();
}

function check() {
  const chosen = document.querySelector(".pick-card input:checked");
  const base = chosen?.dataset.base;
  const own = chosen?.dataset.triggers?.toLowerCase().match(/\p{L}+/gu) ?? [];
  const known = base
    && [...document.querySelector(`template[data-base="${CSS.escape(base)}"]`).dataset.words.split(" "), ...own];
  const used = prompt_.value.toLowerCase().match(/\p{L}+/gu) ?? [];
  const unknown = known ? [...new Set(used)].filter((word) => !known.includes(word)) : [];
  const text = unknown.length
    ? `${words.dataset.say} ${unknown.join(", ")}. It knows colors, shapes and a few landscapes.` : "";
  if (words.textContent !== text) words.textContent = text;
}

let waiting;
prompt_.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(check, 400); });

let before = document.querySelector(".pick-card input:checked");
document.querySelector(".ask").addEventListener("change", (event) => {
  if (!event.target.closest(".pick-card")) return;
  check();
  for (const slider of [document.getElementById("steps"), document.getElementById("guidance_scale")]) {
    if (slider.value !== before?.dataset[slider.id]) continue; // somebody has moved it
    slider.value = event.target.dataset[slider.id];
    slider.dispatchEvent(new Event("input"));
  }
  before = event.target;
});

const find = document.getElementById("find");
find?.addEventListener("keydown", (event) => { if (event.key === "Enter") event.preventDefault(); }); // it looks while one types
find?.nextElementSibling.remove();

document.body.addEventListener("htmx:beforeSwap", (event) => {
  const { target, xhr } = event.detail;
  if (xhr.status !== 200 || target.id !== "panel") return;
  event.detail.shouldSwap = false;
  const parts = new DOMParser().parseFromString(xhr.responseText, "text/html");
  const loading = [...parts.images].map((image) => {
    const ahead = new Image();
    ahead.src = image.getAttribute("src");
    return ahead.decode().catch(() => {});
  });
  const late = new Promise((done) => { setTimeout(done, 3000); });
  Promise.race([Promise.all(loading), late]).then(() => {
    if (target.isConnected) htmx.swap(target, xhr.responseText, { swapStyle: "outerHTML" });
  });
});
