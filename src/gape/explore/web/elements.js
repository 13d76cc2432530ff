// Elements of a page.

/** An element with text and children; text is never read as HTML. */
export function element(name, { text, className, ...attributes } = {}, children = []) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** The text beside the pointer; none without an event or a text. */
export function tip(event, text) {
  const box = document.getElementById("tip");
  box.hidden = !event || !text;
  if (box.hidden) return;
  box.textContent = text;
  box.style.left = `${Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8)}px`;
  box.style.top = `${Math.min(event.clientY + 16, innerHeight - box.offsetHeight - 8)}px`;
}
