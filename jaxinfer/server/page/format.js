// Numbers in words, and what is read off histograms.

const MISSING = "–";

/** Seconds as "3.2 ms", "43 ms" or "1.24 s". */
export function duration(seconds) {
  if (seconds === null || !Number.isFinite(seconds)) return MISSING;
  if (seconds >= 10) return `${seconds.toFixed(1)} s`;
  if (seconds >= 0.9995) return `${seconds.toFixed(2)} s`;
  const ms = seconds * 1000;
  return ms >= 9.95 ? `${ms.toFixed(0)} ms` : `${ms.toFixed(ms >= 0.995 ? 1 : 2)} ms`;
}

/** A count or a rate with separators; one decimal below 10 where it has any. */
export function number(value) {
  if (value === null || !Number.isFinite(value)) return MISSING;
  const digits = Number.isInteger(value) || Math.abs(value) >= 10 ? 0 : 1;
  return value.toLocaleString("en-US", { maximumFractionDigits: digits });
}

/** A share of a whole as "63 %"; a part that is not all is never rounded to all, nor some to none. */
export function percent(part, whole) {
  if (!whole) return MISSING;
  const value = (100 * part) / whole;
  if (value > 0 && value < 1) return "< 1 %";
  return `${value < 100 ? Math.min(Math.round(value), 99) : 100} %`;
}

/** "1 page", "2 pages". */
export function plural(count, word) {
  return `${number(count)} ${word}${count === 1 ? "" : "s"}`;
}

/** What a histogram counted since an earlier reading of it. */
export function since(now, then) {
  return { bounds: now.bounds, counts: now.counts.map((count, i) => count - (then?.counts[i] ?? 0)) };
}

/** How many values a histogram holds. */
export function total(histogram) {
  return histogram.counts.reduce((sum, count) => sum + count, 0);
}

/**
 * The value below which a share of a histogram lies, by a straight line inside its bucket, in words;
 * what lies above the last bound is only known to be more.
 */
export function quantile({ bounds, counts }, share) {
  const all = counts.reduce((sum, count) => sum + count, 0);
  if (!all) return MISSING;
  let below = 0;
  for (let i = 0; i < bounds.length; i++) {
    if (counts[i] && below + counts[i] >= share * all) {
      const low = i ? bounds[i - 1] : 0;
      return duration(low + (bounds[i] - low) * ((share * all - below) / counts[i]));
    }
    below += counts[i];
  }
  return `> ${duration(bounds[bounds.length - 1])}`;
}
