// Forms to try the operations of the reference. Without this file the page can be read, and its curl lines copied.
const keyField = document.getElementById("key");
const credentialField = document.getElementById("credential");

function requestOf(form) {
  const [header, prefix] = credentialField.value.split(/: ?(.*)/s);
  const headers = { [header]: prefix ? `${prefix.trim()} ${keyField.value}` : keyField.value };
  const query = new URLSearchParams();
  const data = new FormData();
  let path = form.dataset.path;
  let body;
  for (const field of form.querySelectorAll("[data-in]")) {
    const { in: place, name } = field.dataset;
    const value = field.type === "file" ? field.files[0] : field.value;
    if (!value) continue;
    if (place === "path") path = path.replace(`{${name}}`, encodeURIComponent(value));
    if (place === "query") query.set(name, value);
    if (place === "header") headers[name] = value;
    if (place === "form") data.set(name, value);
    if (place === "body") {
      headers["Content-Type"] = "application/json";
      body = value;
    }
  }
  if (form.querySelector("[data-in=form]")) body = data;
  return [query.size ? `${path}?${query}` : path, { method: form.dataset.method, headers, body, credentials: "omit" }];
}

function block(text, label) {
  const pre = document.createElement("pre");
  pre.tabIndex = 0;
  pre.ariaLabel = label;
  pre.textContent = text;
  return pre;
}

function readable(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

async function send(form) {
  const answer = form.querySelector(".answer");
  answer.textContent = "Sending…";
  const began = performance.now();
  try {
    const response = await fetch(...requestOf(form));
    const text = await response.text();
    const line = document.createElement("p");
    line.textContent = `${response.status} ${response.statusText}, ${Math.round(performance.now() - began)} ms`;
    const headers = document.createElement("details");
    headers.className = "block";
    headers.append(Object.assign(document.createElement("summary"), { textContent: "Headers" }));
    headers.append(block([...response.headers].map((each) => each.join(": ")).join("\n"), "Headers of the answer"));
    answer.replaceChildren(line, ...(text ? [block(readable(text), "Body of the answer")] : []), headers);
  } catch (error) {
    answer.textContent = `Nothing came back: ${error.message}`;
  }
}

document.getElementById("credentials").addEventListener("submit", (event) => event.preventDefault());
document.querySelectorAll(".key, .try").forEach((part) => { part.hidden = false; });
document.querySelectorAll(".try form").forEach((form) => {
  form.addEventListener("submit", (event) => { event.preventDefault(); send(form); });
  form.querySelector(".example")?.addEventListener("change", (event) => {
    form.querySelector("[data-in=body]").value = event.target.value;
  });
});
