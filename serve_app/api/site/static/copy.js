// A "Copy" button beside whatever may be copied. Without this file a click or tap still selects the whole text.
for (const place of document.querySelectorAll(".copyable")) {
  if (!navigator.clipboard) break; // only offered on https and on localhost
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
