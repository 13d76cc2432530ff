// Colour scales from white to dark, each of one direction of lightness, so that they read without colour too.

const STOPS = {
  attention: ["#ffffff", "#e3f3ea", "#a3dbc7", "#52b3c4", "#2678b2", "#17347f"],
  landmark: ["#ffffff", "#efeaf7", "#cfc3e6", "#a088cb", "#6f4bab", "#401e78"],
  gate: ["#ffffff", "#fdeedd", "#fbcf9d", "#f0994f", "#c95f14", "#7c3004"],
  neutral: ["#ffffff", "#eef1f4", "#cdd5dd", "#9aa6b3", "#667383", "#323c49"],
};

function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** 256 colours as bytes r, g, b, and as CSS texts. */
function table(stops) {
  const rgb = new Uint8Array(768);
  const css = [];
  for (let i = 0; i < 256; i++) {
    const at = (i / 255) * (stops.length - 1);
    const low = Math.min(Math.floor(at), stops.length - 2);
    const [a, b] = [channels(stops[low]), channels(stops[low + 1])];
    for (let c = 0; c < 3; c++) rgb[3 * i + c] = Math.round(a[c] + (b[c] - a[c]) * (at - low));
    css.push(`rgb(${rgb[3 * i]},${rgb[3 * i + 1]},${rgb[3 * i + 2]})`);
  }
  return { rgb, css };
}

export const SCALES = Object.fromEntries(Object.entries(STOPS).map(([name, stops]) => [name, table(stops)]));
export const INK = "#1d2430", FAINT = "#a9b2bd", ACCENT = "#b3470b", SELECTED = "#111827";

/** Whether text on a colour of a scale has to be white. */
export function isDark(scale, byte) {
  const { rgb } = SCALES[scale];
  return 0.3 * rgb[3 * byte] + 0.59 * rgb[3 * byte + 1] + 0.11 * rgb[3 * byte + 2] < 135;
}

/** Paint a legend from the least to the largest value. */
export function paintScale(canvas, scale) {
  const context = canvas.getContext("2d");
  for (let x = 0; x < canvas.width; x++) {
    context.fillStyle = SCALES[scale].css[Math.round((255 * x) / (canvas.width - 1))];
    context.fillRect(x, 0, 1, canvas.height);
  }
}

/** Size a canvas to its place on the page in device pixels; returns a context in CSS pixels. */
export function fitted(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/** A number in few characters. */
export function short(x, digits = 3) {
  if (!Number.isFinite(x)) return "∞";
  if (x !== 0 && Math.abs(x) < 1e-3) return x.toExponential(1).replace("e-", "e−");
  return Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en") : String(Number(x.toPrecision(digits)));
}

/** Bytes as people read them. */
export function bytesText(n) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (n < 1024) return `${unit === "B" ? n : n.toFixed(1)} ${unit}`;
    n /= 1024;
  }
  return `${n.toFixed(1)} GiB`;
}
