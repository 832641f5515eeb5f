// Gives the parts of Zensical's search names and contrast, and takes what is not shown of it from keyboards and readers.
const sheet = new CSSStyleSheet();
sheet.replaceSync("menu { color: rgb(var(--color-foreground) / .7) !important; }");

function settle(search) {
  for (const part of search.querySelectorAll("div > div")) part.inert = getComputedStyle(part).pointerEvents === "none";
  search.querySelectorAll("button").forEach((each, index) => each.setAttribute("aria-label", ["Close", "Filters"][index]));
  search.querySelector("input")?.setAttribute("aria-label", "Search");
  search.querySelector("input")?.setAttribute("role", "searchbox");  // a combobox would have to name its list
}

new MutationObserver((_, waiting) => {
  const search = [...document.body.children].find((each) => each.shadowRoot)?.shadowRoot;
  if (!search) return;
  waiting.disconnect();
  search.adoptedStyleSheets.push(sheet);
  new MutationObserver(() => settle(search)).observe(search, { attributeFilter: ["class"], childList: true, subtree: true });
  settle(search);
}).observe(document.body, { childList: true });

// Zensical finds only what has every word: those that a question has and its answer lacks are not searched for.
const asking = new Set("a an and are be can do does for how i in is it my of on the this to what when where which why with".split(" "));
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...more) {
  const words = message.data?.input?.split?.(/\s+/) ?? [];
  const sought = words.filter((word, place) => place === words.length - 1 || !asking.has(word.toLowerCase()));
  return post.call(this, words.length > 1 ? { ...message, data: { ...message.data, input: sought.join(" ") } } : message, ...more);
};
