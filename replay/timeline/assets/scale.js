// Times and numbers as people read them. Times are milliseconds since the start.
"use strict";

const SECOND = 1000, MINUTE = 60 * SECOND, HOUR = 60 * MINUTE, DAY = 24 * HOUR;
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, ...[1, 2, 5, 10, 15, 30].map((n) => n * SECOND), ...[1, 2, 5, 10, 15, 30].map((n) => n * MINUTE),
  ...[1, 2, 3, 6, 12].map((n) => n * HOUR), ...[1, 2, 5, 10, 20, 50, 100].map((n) => n * DAY)];

/** Round times from `from` to `to`, at most about `most`: [t, text]. */
function ticks(from, to, most) {
  const step = STEPS.find((each) => (to - from) / each <= most) || STEPS[STEPS.length - 1], found = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push([at, tickText(at, step)]);
  return found;
}

function tickText(t, step) {
  const two = (n) => String(n).padStart(2, "0");
  const hours = Math.floor(t / HOUR), minutes = Math.floor(t / MINUTE) % 60, seconds = Math.floor(t / SECOND) % 60;
  if (t === 0) return "0";
  if (step >= DAY) return `${Math.floor(t / DAY)} d`;
  if (step >= HOUR) return `${hours} h`;
  if (step >= MINUTE) return hours ? (minutes ? `${hours} h ${two(minutes)}` : `${hours} h`) : `${minutes} min`;
  const rest = step < SECOND ? `.${String(t % SECOND).padStart(3, "0")}` : "";
  if (hours) return `${hours}:${two(minutes)}:${two(seconds)}${rest} h`;
  if (!minutes) return `${seconds}${rest} s`;
  return seconds || rest ? `${minutes} min ${two(seconds)}${rest}` : `${minutes} min`;
}

/** A length of time, two units at most; days from a hundred hours on. */
function duration(ms) {
  const s = ms / 1000, two = (n) => String(n).padStart(2, "0");
  if (s < 60) return `${Number(s.toPrecision(3))} s`;
  const whole = Math.round(s);
  if (whole >= 360000) return `${Math.floor(whole / 86400)} d ${Math.floor(whole / 3600) % 24} h`;
  if (whole >= 3600) return `${Math.floor(whole / 3600)} h ${two(Math.floor(whole / 60) % 60)} min`;
  return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
}

/** The smallest of 1, 2, 5 times a power of ten that is not below. */
function nice(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1e-9)));
  return [1, 2, 5, 10].map((n) => n * power).find((each) => each >= least);
}

function number(value) {
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));
}
