// A "Copy" button next to whatever may be copied. Without this file a click or tap still selects the whole text.
function addButton(place) {
  const text = place.querySelector("code");
  const button = document.createElement("button");
  const spoken = document.createElement("span");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  spoken.className = "unseen";
  spoken.setAttribute("role", "status");
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text.textContent);
    button.textContent = "Copied";
    spoken.textContent = "Copied to the clipboard";
    setTimeout(() => { button.textContent = "Copy"; spoken.textContent = ""; }, 2000);
  });
  place.append(button, spoken);
}

function addButtons(part) {
  if (navigator.clipboard) part.querySelectorAll(".copyable:not(:has(.copy))").forEach(addButton); // on https and localhost
}

addButtons(document);
document.addEventListener("htmx:load", (event) => addButtons(event.detail.elt));
