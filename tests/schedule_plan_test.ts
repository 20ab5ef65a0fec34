/** When a scheduled loop ticks: calendars against oracles, and the tick's own look at the clock. */
import { assert, assertEquals, assertThrows } from "@std/assert";
import { findDueSlot } from "../scripts/loop-runner.ts";
import {
  describeInterval,
  formatLocalTime,
  listCalendarEntries,
  listNextFires,
  planSchedule,
  renderCalendar,
  renderCronTimes,
  type SchedulePlan,
} from "../scripts/status.ts";
import { fc } from "./deps.ts";
import { isInstalled } from "./install_support.ts";
import { Cron } from "./schedule_support.ts";

const START_MS = Date.parse("2026-03-01T00:00:30Z");
const HOUR_MS = 3_600_000;

/** What is expected of an interval: cron times, OnCalendar values, and whether the calendar is enough. */
// deno-fmt-ignore -- a table: one row a line.
const TABLE: readonly (readonly [seconds: number, exact: boolean, cron: string[], calendar: string[]])[] = [
  [60, true, ["* * * * *"], ["*:*:00"]],
  [90, false, ["* * * * *"], ["*:*:00"]],
  [120, true, ["*/2 * * * *"], ["*:00/2:00"]],
  [300, true, ["*/5 * * * *"], ["*:00/5:00"]],
  [420, false, ["* * * * *"], ["*:*:00"]],
  [480, false, ["* * * * *"], ["*:*:00"]],
  [600, true, ["*/10 * * * *"], ["*:00/10:00"]],
  [900, true, ["*/15 * * * *"], ["*:00/15:00"]],
  [1440, true, ["0 0-23/2 * * *", "24 0-23/2 * * *", "48 0-23/2 * * *", "12 1-23/2 * * *", "36 1-23/2 * * *"], ["00/2:00,24,48:00", "01/2:12,36:00"]],
  [1800, true, ["*/30 * * * *"], ["*:00/30:00"]],
  [2400, true, ["0 0-23/2 * * *", "40 0-23/2 * * *", "20 1-23/2 * * *"], ["00/2:00,40:00", "01/2:20:00"]],
  [2700, true, ["0 0-23/3 * * *", "45 0-23/3 * * *", "30 1-23/3 * * *", "15 2-23/3 * * *"], ["00/3:00,45:00", "01/3:30:00", "02/3:15:00"]],
  [3000, false, ["*/2 * * * *"], ["*:00/2:00"]],
  [3600, true, ["0 * * * *"], ["*:00:00"]],
  [5400, true, ["0 0-23/3 * * *", "30 1-23/3 * * *"], ["00/3:00:00", "01/3:30:00"]],
  [7200, true, ["0 */2 * * *"], ["00/2:00:00"]],
  [10_800, true, ["0 */3 * * *"], ["00/3:00:00"]],
  [17_280, true, ["0 0 * * *", "48 4 * * *", "36 9 * * *", "24 14 * * *", "12 19 * * *"], ["00:00:00", "04:48:00", "09:36:00", "14:24:00", "19:12:00"]],
  [18_000, false, ["*/15 * * * *"], ["*:00/15:00"]],
  [21_600, true, ["0 */6 * * *"], ["00/6:00:00"]],
  [43_200, true, ["0 */12 * * *"], ["00/12:00:00"]],
  [86_400, true, ["0 0 * * *"], ["00:00:00"]],
  [100_000, false, ["*/30 * * * *"], ["*:00/30:00"]],
  [604_800, false, ["*/30 * * * *"], ["*:00/30:00"]],
];

const oracle = new Map<string, number[]>();

/** When one cron line fires; kept, since the oracle takes its time and lines return in many plans. */
function listLineFires(line: string, hours: number, timezone: string): number[] {
  const key = `${line} ${timezone}`;
  const known = oracle.get(key) ?? [];
  oracle.set(key, known);
  const endMs = START_MS + hours * HOUR_MS;
  const cron = new Cron(line, { timezone });
  while ((known.at(-1) ?? 0) <= endMs) {
    const next = cron.nextRun(new Date(known.at(-1) ?? START_MS));
    if (next === null) throw new Error(`${line} does not fire again`);
    known.push(next.getTime());
  }
  return known.filter((at) => at <= endMs);
}

/** When the lines of a plan fire, by an oracle that reads cron lines. */
function listCronFires(lines: readonly string[], hours: number, timezone = "UTC"): number[] {
  return lines.flatMap((line) => listLineFires(line, hours, timezone)).sort((a, b) => a - b);
}

/** Of a schedule's wakes, each some time late, those at which the tick finds that it is due. */
function listTicks(
  plan: SchedulePlan,
  wakes: readonly number[],
  { lateMs, zoneOffsetMs = 0 }: { lateMs: (index: number) => number; zoneOffsetMs?: number },
): number[] {
  if (plan.isExact) return [...wakes];
  const check = { intervalMs: plan.intervalS * 1000, periodMs: plan.periodMin * 60_000 };
  let lastSlotMs: number | null = null;
  return wakes.filter((wakeMs, index) => {
    const nowMs = wakeMs + lateMs(index);
    const slotMs = findDueSlot(check, { nowMs, lastSlotMs, zoneOffsetMs });
    if (slotMs !== null) {
      assertEquals(slotMs, wakeMs, "the slot is the schedule's own time");
      lastSlotMs = slotMs;
    }
    return slotMs !== null;
  });
}

function assertSpacing(plan: SchedulePlan, ticks: readonly number[]): void {
  const [least, most] = [plan.intervalS * 1000, plan.intervalS * 1000 + plan.periodMin * 60_000];
  ticks.slice(1).forEach((tick, index) => {
    const gap = tick - ticks[index]!;
    const words = `${plan.intervalS} s: ${gap / 1000} s after ${new Date(ticks[index]!).toJSON()}`;
    assert(gap >= least, `too early: ${words}`);
    assert(gap <= most, `too late: ${words}`);
  });
  const first = ticks[0] ?? Infinity;
  assert(first - START_MS <= most, `${plan.intervalS} s: the first tick is late`);
}

/** A second or two, as cron is late. */
const lateness = (index: number): number => [0, 400, 1100, 2000][index % 4]!;

for (const [seconds, exact, cron, calendar] of TABLE) {
  Deno.test(`${describeInterval(seconds)} is kept over 48 hours and more`, () => {
    const plan = planSchedule(seconds, "cron");
    assertEquals(plan.isExact, exact);
    assertEquals(renderCronTimes(plan.periodMin), cron);
    assertEquals(renderCalendar(plan.periodMin), calendar);
    const hours = Math.max(48, 3 * seconds / 3600);
    const wakes = listCronFires(cron, hours);
    const ticks = listTicks(plan, wakes, { lateMs: lateness });
    assert(ticks.length >= Math.floor(hours * 3600 / (seconds + plan.periodMin * 60)));
    assertSpacing(plan, ticks);
  });
}

Deno.test("45, 90 and 7 minutes are exact to the second", () => {
  for (const minutes of [45, 90, 7]) {
    const plan = planSchedule(minutes * 60, "cron");
    const wakes = listCronFires(renderCronTimes(plan.periodMin), 48);
    const ticks = listTicks(plan, wakes, { lateMs: lateness });
    const gaps = new Set(ticks.slice(1).map((tick, index) => (tick - ticks[index]!) / 60_000));
    assertEquals([...gaps], [minutes]);
  }
});

Deno.test("any interval from a minute to a week is never early and at most one period late", () => {
  fc.assert(
    fc.property(
      fc.integer({ min: 60, max: 604_800 }),
      fc.integer({ max: 2500, min: 0 }),
      (s, late) => {
        const plan = planSchedule(s, "cron");
        const hours = Math.max(48, 2.2 * s / 3600);
        const step = plan.periodMin * 60_000;
        const first = Math.ceil(START_MS / step) * step;
        const count = Math.floor(hours * HOUR_MS / step);
        const wakes = Array.from({ length: count }, (_, index) => first + index * step);
        assertSpacing(plan, listTicks(plan, wakes, { lateMs: (index) => index % 2 * late }));
      },
    ),
    { numRuns: 300 },
  );
});

Deno.test("slots follow the local calendar, also where a zone is not ahead by whole hours", () => {
  const zoneOffsetMs = 345 * 60_000;
  const plan = planSchedule(100_000, "cron");
  const wakes = listCronFires(renderCronTimes(plan.periodMin), 100, "Asia/Kathmandu");
  assertSpacing(plan, listTicks(plan, wakes, { lateMs: lateness, zoneOffsetMs }));
});

Deno.test("findDueSlot() takes the first wake, and a slot in the future counts for nothing", () => {
  const check = { intervalMs: 420_000, periodMs: 60_000 };
  const at = (nowMs: number, lastSlotMs: number | null) =>
    findDueSlot(check, { nowMs, lastSlotMs, zoneOffsetMs: 0 });
  assertEquals(at(61_000, null), 60_000);
  assertEquals(at(420_900, 0), 420_000);
  assertEquals(at(360_900, 0), null);
  assertEquals(at(60_000, 600_000), 60_000, "the clock was set back");
  assertEquals(at(29_000, 0), null, "twice in one slot");
});

Deno.test("launchd's list of times is what the cron lines say", () => {
  for (const [seconds] of TABLE) {
    const { periodMin } = planSchedule(seconds, "launchd");
    const listed = listCalendarEntries(periodMin).flatMap(({ Hour, Minute }) =>
      Hour === undefined
        ? Array.from({ length: 24 }, (_, hour) => hour * 60 + Minute)
        : [Hour * 60 + Minute]
    ).sort((a, b) => a - b);
    const day = listCronFires(renderCronTimes(periodMin), 24).map((at) => at / 60_000 % 1440);
    assertEquals(listed, [...day].sort((a, b) => a - b), `${seconds} s`);
  }
});

Deno.test({
  name: "systemd reads the OnCalendar values as the cron lines (needs systemd-analyze)",
  ignore: !isInstalled("systemd-analyze"),
  fn: () => {
    for (const [seconds, , cron, calendar] of TABLE) {
      const expected = listCronFires(cron, 7);
      const { code, stdout, stderr } = new Deno.Command("systemd-analyze", {
        args: ["calendar", "--base-time=2026-03-01 00:00:30", "--iterations=430", ...calendar],
        env: { TZ: "UTC", LC_ALL: "C" },
      }).outputSync();
      assertEquals(code, 0, new TextDecoder().decode(stderr));
      const found = [
        ...new TextDecoder().decode(stdout).matchAll(
          /(?:Next elapse|Iter\. #\d+|Iteration #\d+): \w+ (\S+) (\S+) UTC/g,
        ),
      ].map(([, date, time]) => Date.parse(`${date}T${time}Z`));
      const inTime = found.filter((at) => at <= START_MS + 7 * HOUR_MS).sort((a, b) => a - b);
      assertEquals(inTime, expected, `${seconds} s: ${calendar.join(" ")}`);
    }
  },
});

Deno.test("the next fires are those of the cron lines and of the tick's own check", () => {
  for (const [seconds, exact, cron] of TABLE) {
    const plan = planSchedule(seconds, "cron");
    const wakes = cron.flatMap((line) =>
      new Cron(line).nextRuns(exact ? 3 : 2000, new Date(START_MS))
    )
      .map((at) => at.getTime()).sort((a, b) => a - b);
    const zoneOffsetMs = -new Date(START_MS).getTimezoneOffset() * 60_000;
    const ticks = listTicks(plan, wakes, { lateMs: () => 0, zoneOffsetMs }).slice(0, 3);
    const options = { fromMs: START_MS, lastSlotMs: null, count: ticks.length };
    assertEquals(listNextFires(plan, options), ticks, `${seconds} s`);
  }
});

Deno.test("the next fires keep their distance from the last slot, unless it is in the future", () => {
  const plan = planSchedule(420, "cron");
  const fires = (lastSlotMs: number) =>
    listNextFires(plan, { fromMs: START_MS, lastSlotMs, count: 1 })[0]! - START_MS;
  assertEquals(fires(START_MS - 30_000), 390_000);
  assertEquals(fires(START_MS + HOUR_MS), 30_000);
});

Deno.test("Windows takes any minutes, counted from the start of its trigger", () => {
  assertEquals(planSchedule(90, "schtasks"), { intervalS: 90, periodMin: 2, isExact: true });
  const plan = planSchedule(420, "schtasks");
  assertEquals(plan, { intervalS: 420, periodMin: 7, isExact: true });
  const anchorMs = new Date(2020, 0, 1).getTime();
  const fires = listNextFires(plan, { fromMs: START_MS, lastSlotMs: null, count: 3 });
  for (const at of fires) assertEquals((at - anchorMs) % 420_000, 0);
  assert(fires[0]! > START_MS && fires[0]! <= START_MS + 420_000);
});

Deno.test("Kubernetes has one cron line: several become one and the tick's own check", () => {
  for (
    const [seconds, periodMin, isExact] of [
      [2700, 15, false],
      [5400, 30, false],
      [1440, 12, false],
      [3600, 60, true],
    ] as const
  ) {
    const plan = planSchedule(seconds, "kubernetes");
    assertEquals(plan, { intervalS: seconds, periodMin, isExact });
    const wakes = listCronFires(renderCronTimes(periodMin), 48);
    const ticks = listTicks(plan, wakes, { lateMs: lateness });
    const gaps = new Set(ticks.slice(1).map((tick, index) => tick - ticks[index]!));
    assertEquals([...gaps], [seconds * 1000]);
  }
});

Deno.test("GitHub is never asked for less than five minutes", () => {
  fc.assert(
    fc.property(fc.integer({ min: 300, max: 604_800 }), (seconds) => {
      assert(planSchedule(seconds, "github-actions").periodMin >= 5);
    }),
  );
});

Deno.test("planSchedule() refuses what no scheduler takes", () => {
  for (const seconds of [0, 59, 60.5, NaN, -60, 31 * 86_400 + 1]) {
    assertThrows(() => planSchedule(seconds, "cron"), RangeError, "Cannot schedule an interval of");
  }
  assertThrows(() => planSchedule(299, "github-actions"), RangeError, "300");
});

Deno.test("times are shown with the zone's offset", () => {
  const shown = formatLocalTime(START_MS);
  const parsed = Date.parse(shown.replace(" ", "T").replace(" ", ""));
  assertEquals(parsed, START_MS - 30_000);
});

Deno.test("intervals are told in their largest whole unit", () => {
  const told = [60, 90, 2700, 7200, 86_400, 604_800].map(describeInterval);
  assertEquals(told, [
    "every 1 min",
    "every 90 s",
    "every 45 min",
    "every 2 h",
    "every 1 day",
    "every 7 days",
  ]);
});
