// What is wrong with a page: language, title, window, headings, texts of pictures, width, contrast, requests elsewhere.
function faultsOf(view) {
  const page = view.document, root = page.documentElement, found = [];
  if (!/^(en|zh-CN)$/.test(root.lang)) found.push(`lang is "${root.lang}"`);
  if (!page.title.trim()) found.push("no title");
  if (!page.querySelector('meta[name="viewport"][content*="width=device-width"]')) found.push("no viewport for phones");
  const levels = [...page.querySelectorAll("article h1, article h2, article h3, article h4, article h5")].map((h) => +h.tagName[1]);
  if (levels[0] !== 1 || levels.filter((level) => level === 1).length !== 1) found.push(`headings begin ${levels.slice(0, 3)}`);
  levels.forEach((level, at) => { if (at && level > levels[at - 1] + 1) found.push(`heading ${at} jumps to h${level}`); });
  for (const image of page.images) {
    if (!image.alt.trim()) found.push(`no alt: ${image.src}`);
    if (image.complete && !image.naturalWidth) found.push(`not drawn: ${image.src}`);
  }
  for (const control of page.querySelectorAll("article input, article select")) {
    if (!control.labels?.length && !control.getAttribute("aria-label")) found.push(`a field without a label`);
  }
  if (root.scrollWidth > view.innerWidth + 1) found.push(`${root.scrollWidth} px wide in ${view.innerWidth}`);
  for (const { name } of view.performance.getEntriesByType("resource")) {
    if (!name.startsWith(view.location.origin) && !name.startsWith("data:")) found.push(`asks elsewhere: ${name}`);
  }
  for (const link of page.querySelectorAll('script[src^="http"], link[rel=stylesheet][href^="http"], img[src^="http"]')) {
    if (!(link.src ?? link.href).startsWith(view.location.origin)) found.push(`asks elsewhere: ${link.outerHTML.slice(0, 80)}`);
  }
  return [...found, ...contrastFaults(view)];
}

function contrastFaults(view) {
  const found = new Map(), walker = view.document.createTreeWalker(view.document.querySelector("article"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const holder = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !holder.getClientRects().length) continue;
    const style = view.getComputedStyle(holder);
    if (style.visibility === "hidden" || style.opacity === "0") continue;
    const ground = groundOf(view, holder), ink = mixed(numbersOf(style.color), ground);
    const size = parseFloat(style.fontSize), isLarge = size >= 24 || (size >= 18.66 && +style.fontWeight >= 700);
    const ratio = ratioOf(ink, ground);
    const key = `${holder.className || holder.tagName} ${style.color} on ${ground.map(Math.round)}`;
    if (ratio < (isLarge ? 3 : 4.5)) found.set(key, `contrast ${ratio.toFixed(2)}: ${key}`);
  }
  return [...found.values()];
}

function groundOf(view, element) {
  const layers = [];
  for (let at = element; at; at = at.parentElement) layers.push(numbersOf(view.getComputedStyle(at).backgroundColor));
  return layers.reverse().reduce((below, layer) => mixed(layer, below), [255, 255, 255]);
}

function numbersOf(colour) {
  const [red, green, blue, alpha = 1] = colour.match(/[\d.]+/g).map(Number);
  return [red, green, blue, alpha];
}

function mixed([red, green, blue, alpha], below) {
  return [red, green, blue].map((value, at) => value * alpha + below[at] * (1 - alpha));
}

function ratioOf(first, second) {
  const light = (colour) => {
    const [red, green, blue] = colour.map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const [high, low] = [light(first), light(second)].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
}

async function checkAll(pages, ways) {
  const frame = document.body.appendChild(document.createElement("iframe")), found = {};
  for (const { width, theme } of ways) {
    frame.style.cssText = `width: ${width}px; height: 800px; border: 0`;
    for (const page of pages) {
      localStorage.setItem("theme", theme);
      await new Promise((done) => { frame.onload = done; frame.src = `/${page}`; });
      const shown = frame.contentDocument.body.dataset.theme;
      const faults = [...(shown && shown !== theme ? [`drawn ${shown}`] : []), ...faultsOf(frame.contentWindow)];
      if (faults.length) found[`${page} ${width} ${theme}`] = faults;
    }
  }
  await fetch("/found", { method: "POST", body: JSON.stringify(found) });
}
