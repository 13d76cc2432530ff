// Elements of a page.

/** An element with text and children; text is never read as HTML. */
export function element(name, { text, className, ...attributes } = {}, children = []) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
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
