// Explanations in notebooks are pages in frames: they get the height of their content and the theme of the site.
const MAX_HEIGHT = 1100; // of a frame; longer pages scroll
const darkRules = new WeakSet(), watched = new WeakSet();
function adaptTheme(page) {
  const dark = document.body.dataset.mdColorScheme === "slate";
  page.documentElement.style.colorScheme = dark ? "dark" : "light";
  for (const rule of [...page.styleSheets].flatMap((sheet) => [...sheet.cssRules])) {
    if (rule.media?.mediaText.includes("prefers-color-scheme: dark")) darkRules.add(rule);
    if (darkRules.has(rule)) rule.media.mediaText = dark ? "screen" : "not all";
  }
}
function adapt(frame) {
  const page = frame.contentDocument;
  if (!page?.body) return;
  adaptTheme(page);
  if (watched.has(page)) return;
  watched.add(page);
  new ResizeObserver(() => {
    frame.style.height = `${Math.min(page.body.scrollHeight + 2, MAX_HEIGHT)}px`;
  }).observe(page.body);
}
function adaptAll() {
  for (const frame of document.querySelectorAll(".notebook-output iframe")) {
    frame.onload = () => adapt(frame);
    adapt(frame);
  }
}
new MutationObserver(adaptAll).observe(document.body, { attributes: true, attributeFilter: ["data-md-color-scheme"] });
window.document$?.subscribe(adaptAll); // pages that are loaded without a reload
adaptAll();
