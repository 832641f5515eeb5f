// The playground works without this file; with it, examples fill in the prompt, sliders say their value and a part with guidance
// what it saves, no more LoRAs can be chosen than act together, words are checked while they are typed, a chosen picture is sent
// at once, and a new picture of a job is loaded before it takes the place of the one before.
const prompt_ = document.getElementById("prompt");
const words = document.getElementById("words");
const chosenLoras = () => [...document.querySelectorAll(".pick-card :checked")];
const basesOf = (box) => box.dataset.bases.split(" "); // what a LoRA can be drawn on, its own first
const chosenBase = () => document.getElementById("base_model")?.value;

for (const link of document.querySelectorAll(".examples a")) {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    prompt_.value = link.textContent;
    prompt_.focus();
    check();
  });
}

const saved = document.getElementById("saved");
const rule = saved.textContent;
function tellSaved() { // of the work, where guidance acts on a part of the steps: a step without it takes one row of two
  const [start, end] = ["guidance_start", "guidance_end"].map((id) => document.getElementById(id).value);
  const part = (end || 1) - start;
  const percent = (share) => `${Math.round(100 * share)} %`;
  const text = part > 0 && part < 1
    ? `Guidance over ${percent(part)} of the steps: about ${percent((1 - part) / 2)} less work` : rule;
  if (saved.textContent !== text) saved.textContent = text;
}
tellSaved();

document.addEventListener("input", ({ target }) => {
  tellSaved();
  if (target.type === "range") document.querySelector(`output[for=${target.id}]`).textContent = target.value;
});

function check() {
  const chosen = chosenLoras();
  const base = chosenBase() || (chosen[0] && basesOf(chosen[0])[0]);
  const model = document.querySelector(base ? `template[data-base="${CSS.escape(base)}"]` : "template[data-base]");
  const lettersOf = (text) => text.toLowerCase().match(/\p{L}+/gu) ?? [];
  const known = model && [...model.dataset.words.split(" "), ...chosen.flatMap((box) => lettersOf(box.dataset.triggers))];
  const unknown = known ? [...new Set(lettersOf(prompt_.value))].filter((word) => !known.includes(word)) : [];
  const text = unknown.length
    ? `${words.dataset.say} ${unknown.join(", ")}. It knows colors, shapes and a few landscapes.` : "";
  if (words.textContent !== text) words.textContent = text;
}

function limit() { // to as many LoRAs as act together on one base model, to those base models, and to their weights
  const most = document.querySelector("[data-most]")?.dataset.most;
  const chosen = chosenLoras();
  const base = chosenBase();
  const fits = (box) => base ? basesOf(box).includes(base) : basesOf(box)[0] === basesOf(chosen[0] ?? box)[0];
  for (const option of document.querySelectorAll("#base_model option")) {
    option.disabled = option.value !== "" && !option.selected && chosen.some((box) => !basesOf(box).includes(option.value));
  }
  for (const card of most ? document.querySelectorAll(".pick-card") : []) {
    const [box, weight] = card.querySelectorAll("input");
    box.disabled = !box.checked && (chosen.length >= most || !fits(box));
    weight.disabled = !box.checked;
  }
}

let waiting;
prompt_.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(check, 400); });
document.addEventListener("change", ({ target }) => {
  if (target.type === "file") target.form.requestSubmit();
  if (target.id === "base_model" || target.closest(".pick-card")) check();
  limit();
});
limit();

document.addEventListener("keydown", (event) => {
  const isAsked = event.key === "Enter" && (event.ctrlKey || event.metaKey);
  if (isAsked) prompt_.form.requestSubmit(document.querySelector("button.go"));
});

document.getElementById("find")?.addEventListener("keydown", (event) => {
  if (event.key === "Enter") event.preventDefault(); // the search runs while one types
});

document.body.addEventListener("htmx:afterSwap", limit);
document.body.addEventListener("htmx:beforeSwap", (event) => {
  const { target, xhr } = event.detail;
  if (target.id === "picture-problem") event.detail.shouldSwap = true; // which says why a picture was refused
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
