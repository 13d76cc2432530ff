import { PanZoom } from "./panzoom.js";

// Figures of a report: with Ctrl and the wheel, two fingers, a double click or keys they zoom as the explorer's maps do.

for (const frame of document.querySelectorAll("figure .zoom")) {
  const image = frame.querySelector("img");
  const zoom = new PanZoom(frame, {
    most: 16, needsControl: true,
    changed: () => {
      image.style.transform = `scale(${zoom.zoom}) translate(${-100 * zoom.x}%, ${-100 * zoom.y}%)`;
      frame.classList.toggle("zoomed", zoom.zoom > 1);
    },
  });
  frame.parentElement.querySelector("button").addEventListener("click", () => zoom.show(0, 0, 1));
}
document.documentElement.dataset.ready = "yes";
