// Sends the form of a LoRA with progress: how much of the file has arrived, then that it is checked. Without this file the form
// is sent as any other.
const form = document.getElementById("upload");
const bar = document.getElementById("upload-progress");

function show(text, share) {
  bar.hidden = false;
  bar.querySelector("p").textContent = text;
  const progress = bar.querySelector("progress");
  if (share === null) progress.removeAttribute("value"); else progress.value = share;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const button = form.querySelector("button.main");
  const request = new XMLHttpRequest();
  button.disabled = true;
  show("Sending the file…", 0);
  request.upload.addEventListener("progress", ({ loaded, total, lengthComputable }) => {
    if (lengthComputable) show(`Sending the file: ${Math.floor((100 * loaded) / total)} %`, loaded / total);
  });
  request.upload.addEventListener("load", () => show("Checking the file against its base model…", null));
  request.addEventListener("load", () => {
    if (request.status === 200 && new URL(request.responseURL).pathname !== new URL(form.action).pathname) {
      location.assign(request.responseURL);
      return;
    }
    const page = new DOMParser().parseFromString(request.responseText, "text/html");
    document.getElementById("refused").replaceChildren(...(page.getElementById("refused") ?? page.querySelector("main")).childNodes);
    bar.hidden = true;
    button.disabled = false;
  });
  request.addEventListener("error", () => {
    show("The connection was lost. Nothing was added; try again.", 0);
    button.disabled = false;
  });
  request.open("POST", form.action);
  request.send(new FormData(form));
});
