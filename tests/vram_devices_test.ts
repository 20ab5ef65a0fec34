/**
 * Devices: pure parsers over the texts that real programs print (tests/fixtures/vram, from public
 * reports, identifiers changed), and the program with stand-ins for them on PATH.
 */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { join } from "@std/path";
import {
  isAlive,
  lastJson,
  makeScratch,
  poll,
  ROOT,
  run,
  runProgram,
  type Scratch,
  writeFile,
  writeScript,
} from "./helpers.ts";
import { at, GIB, MIB, writeFamily } from "./vram_support.ts";
import {
  type DeviceReport,
  parseAmdSysfs,
  parseAppleSysctl,
  parseHostMemory,
  parseIntelSysfs,
  parseLinuxFacts,
  parseNvidiaSmi,
  parseRocmSmi,
  parseWindows,
  parseWindowsMemory,
  parseWindowsRegistry,
  type ProbeOutput,
} from "../scripts/vram-detect.ts";

const fixturePath = (name: string) => join(ROOT, "tests", "fixtures", "vram", name);
const fixture = (name: string) => Deno.readTextFileSync(fixturePath(name));
const printed = (stdout: string, code = 0): ProbeOutput => ({
  code,
  stdout,
  stderr: "",
});
const cuda = (list: string) => ({ variable: "CUDA_VISIBLE_DEVICES", list });
const hip = (list: string) => ({ variable: "HIP_VISIBLE_DEVICES", list });
/** What sysctl prints on a Mac with an Apple GPU: memory, then the limit. */
const apple = (numbers: string) => {
  const [memory, limit] = numbers.split("\n");
  return `hw.memsize: ${memory}\nhw.optional.arm64: 1\niogpu.wired_limit_mb: ${limit}\n`;
};
const readingOf = (total_bytes: number | null, free_bytes: number | null) => ({
  total_bytes,
  free_bytes,
  unknown_reason: null,
  note: null,
});
const facts = (name: string) => parseLinuxFacts(fixture(name));
const HOST = readingOf(128 * GIB, 100 * GIB);
const BLIND = { ...readingOf(null, null), unknown_reason: "not told" };

/** A device in short: kind, free MiB (or why unknown), total MiB. */
function brief(device: DeviceReport | undefined): [string, number | string | null, number | null] {
  if (device === undefined) return ["none", null, null];
  const { kind, free_bytes, unknown_reason, total_bytes } = device;
  const free = free_bytes === null ? unknown_reason : free_bytes / MIB;
  return [kind, free, total_bytes === null ? null : total_bytes / MIB];
}

Deno.test("parseNvidiaSmi() reads two cards in MiB", () => {
  const { state, devices } = parseNvidiaSmi(printed(fixture("nvidia-two-cards.txt")), null, HOST);
  assertEquals(state, "found");
  assertEquals(devices.map(brief), [["discrete", 23802, 24564], ["discrete", 11754, 12288]]);
  assertEquals(devices[0]?.name, "NVIDIA GeForce RTX 4090");
});

Deno.test("parseNvidiaSmi() takes a card without figures for unknown, never for empty", () => {
  for (
    const [name, words] of [
      ["nvidia-not-supported.txt", "[Not Supported]"],
      ["nvidia-mig.txt", "[Insufficient Permissions]"],
      ["nvidia-lost.txt", "[GPU is lost]"],
    ] as const
  ) {
    const { state, devices } = parseNvidiaSmi(printed(fixture(name)), null, HOST);
    assertEquals([state, devices.length, devices[0]?.free_bytes], ["found", 1, null]);
    assertStringIncludes(devices[0]?.unknown_reason ?? "", words);
  }
  const absurd = parseNvidiaSmi(printed("0, GPU-aa, A, 8192, 8193"), null, HOST);
  assertEquals(brief(absurd.devices[0]), [
    "discrete",
    "nvidia-smi says memory.total 8192, memory.free 8193",
    8192,
  ]);
  const mixed = parseNvidiaSmi(printed(fixture("nvidia-na.txt")), null, HOST);
  assertEquals(mixed.devices.map((device) => device.free_bytes), [23802 * MIB, null]);
});

Deno.test("parseNvidiaSmi() gives a GPU that shares the machine's memory what is available there", () => {
  const { devices } = parseNvidiaSmi(printed(fixture("nvidia-gb10.txt")), null, HOST);
  assertEquals(brief(devices[0]), ["integrated", 100 * 1024, 128 * 1024]);
  assertEquals(devices[0]?.note, "shares the machine's memory");
  const blind = parseNvidiaSmi(printed(fixture("nvidia-gb10.txt")), null, BLIND);
  assertEquals(brief(blind.devices[0])[1], "not told");
});

Deno.test("parseNvidiaSmi() knows by name which GPUs have no memory of their own", () => {
  const kindOf = (name: string) => {
    const row = `0, GPU-0f1e2d3c, ${name}, 8192, 4096`;
    return parseNvidiaSmi(printed(row), null, HOST).devices[0]?.kind;
  };
  const unified = ["NVIDIA GB10", "NVIDIA Thor", "Orin (nvgpu)", "NVIDIA Jetson AGX Orin"];
  assertEquals(unified.map(kindOf), Array(4).fill("integrated"));
  const own = ["NVIDIA GB100", "NVIDIA GB200", "NVIDIA GH200 480GB", "NVIDIA Thorium"];
  assertEquals(own.map(kindOf), Array(4).fill("discrete"));
});

Deno.test("parseNvidiaSmi() reads names with commas, and a card that is listed twice once", () => {
  const rows = "0, GPU-aa, NVIDIA A, B, C, 8192, 4096\r\n0, GPU-aa, NVIDIA A, B, C, 8192, 4096\r\n";
  const { devices } = parseNvidiaSmi(printed(rows), null, HOST);
  assertEquals(devices.map((device) => [device.name, device.free_bytes]), [
    ["NVIDIA A, B, C", 4 * GIB],
  ]);
});

Deno.test("parseNvidiaSmi() does not let a card that has failed hide the others, nor be forgotten", () => {
  const words = "Unable to determine the device handle for GPU0000:02:00.0: Unknown Error";
  const rows = `0, GPU-aa, NVIDIA A, 8192, 4096\n${words}\n`;
  for (const code of [0, 15]) {
    const { state, devices } = parseNvidiaSmi(printed(rows, code), null, HOST);
    assertEquals([state, ...devices.map(brief)], [
      "found",
      ["discrete", 4096, 8192],
      ["discrete", `nvidia-smi says: ${words}`, null],
    ]);
  }
});

Deno.test("parseNvidiaSmi() repeats the words of a driver that fails, and knows no cards then", () => {
  const cases: [ProbeOutput, string, RegExp][] = [
    [
      printed(fixture("nvidia-mismatch.txt"), 18),
      "unknown",
      /exited with 18: Failed to initialize NVML: Driver\/library version mismatch/,
    ],
    [
      printed(fixture("nvidia-no-driver.txt"), 9),
      "unknown",
      /exited with 9: NVIDIA-SMI has failed because/,
    ],
    [printed(fixture("nvidia-none.txt"), 6), "absent", /No devices were found/],
    [printed(fixture("nvidia-none.txt")), "absent", /No devices were found/],
    [{ problem: "is not installed" }, "absent", /nvidia-smi is not installed/],
    [{ problem: "gave no answer within 5 s" }, "unknown", /nvidia-smi gave no answer within 5 s/],
    [printed("Driver says hello\n"), "unknown", /a line that is no card: Driver says hello/],
    [printed(""), "absent", /lists no card/],
  ];
  for (const [output, state, reason] of cases) {
    const report = parseNvidiaSmi(output, null, HOST);
    assertEquals([report.state, report.devices], [state, []]);
    assertMatch(report.reason ?? "", reason);
  }
});

Deno.test("parseNvidiaSmi() honours CUDA_VISIBLE_DEVICES: indexes, uuids, order, the first wrong entry", () => {
  const shown = (visible: string) =>
    parseNvidiaSmi(printed(fixture("nvidia-two-cards.txt")), cuda(visible), HOST);
  const frees = (visible: string) => shown(visible).devices.map((d) => (d.free_bytes ?? 0) / MIB);
  assertEquals(frees("1"), [11754]);
  assertEquals(frees("1,0"), [11754, 23802]);
  assertEquals(frees("GPU-9b7e"), [11754]);
  assertEquals(frees("0,7,1"), [23802]);
  assertEquals(frees("0,0,1"), [23802]);
  assertEquals(["", "-1", "7"].map((visible) => shown(visible).state), [
    "absent",
    "absent",
    "absent",
  ]);
  // Cards of different kinds may be numbered otherwise by CUDA.
  assertMatch(`${shown("1").devices[0]?.note}`, /unless CUDA_DEVICE_ORDER is PCI_BUS_ID/);
  assertEquals(shown("GPU-9b7e").devices[0]?.note, null);
  // Blanks are allowed, three letters of a uuid are not enough, and a uuid is no index.
  assertEquals(frees(" 1 , 0 "), [11754, 23802]);
  assertEquals(frees("GPU"), []);
  assertEquals(frees("GPU-"), [23802]);
  const mig = shown("MIG-3f2a");
  assertEquals([mig.state, mig.reason], [
    "unknown",
    "CUDA_VISIBLE_DEVICES lists MIG-3f2a, whose memory is not known",
  ]);
  assertEquals(shown("7").reason, "CUDA_VISIBLE_DEVICES hides all");
});

Deno.test("parseAmdSysfs() reads a card of its own, and an APU together with the machine's memory", () => {
  const discrete = facts("linux-amd-discrete.txt");
  const card = parseAmdSysfs(discrete, null, parseHostMemory(discrete));
  assertEquals(card.devices.map(brief), [
    ["discrete", (25753026560 - 1294256640) / MIB, 25753026560 / MIB],
  ]);
  assertEquals(card.devices[0]?.name, "AMD card0 (1002:744C)");

  const apu = facts("linux-amd-apu.txt");
  const host = parseHostMemory(apu);
  // The pool of carve-out and borrowed memory, cut to what the machine has available.
  const available = 117440512 * 1024 + (536870912 - 134217728);
  const pool = 536870912 - 134217728 + 128849018880 - 536870912;
  assertEquals(brief(parseAmdSysfs(apu, null, host).devices[0]), [
    "integrated",
    Math.min(available, pool) / MIB,
    (536870912 + 128849018880) / MIB,
  ]);
  const tight = readingOf(128 * GIB, 10 * GIB);
  assertEquals(brief(parseAmdSysfs(apu, null, tight).devices[0])[1], 10 * 1024 + 384);
  assertEquals(brief(parseAmdSysfs(apu, null, BLIND).devices[0])[1], "not told");
});

/** An AMD card of so many bytes, none of them used; of what it may borrow `gttUsed` are. */
function amdCard(vram: number, gtt: number, gttUsed = 0): DeviceReport | undefined {
  const root = "/sys/class/drm/card0/device";
  const files = new Map([
    [`${root}/vendor`, "0x1002"],
    [`${root}/mem_info_vram_total`, `${vram}`],
    [`${root}/mem_info_vram_used`, "0"],
    [`${root}/mem_info_gtt_total`, `${gtt}`],
    [`${root}/mem_info_gtt_used`, `${gttUsed}`],
  ]);
  return parseAmdSysfs(files, null, HOST).devices[0];
}

Deno.test("parseAmdSysfs() takes a card for an APU from 8 GiB and four times its own 4 GiB on", () => {
  const kind = (vram: number, gtt: number) => amdCard(vram, gtt)?.kind;
  assertEquals(kind(4 * GIB, 16 * GIB), "integrated");
  assertEquals(kind(4 * GIB, 16 * GIB - 1), "discrete");
  assertEquals(kind(4 * GIB + 1, 64 * GIB), "discrete");
  assertEquals(kind(GIB, 8 * GIB), "integrated");
  assertEquals(kind(GIB, 8 * GIB - 1), "discrete");
  // What is borrowed already is not free.
  assertEquals(amdCard(GIB, 32 * GIB, 12 * GIB)?.free_bytes, 21 * GIB);
});

Deno.test("parseAmdSysfs() does not guess which card a uuid means", () => {
  const card = facts("linux-amd-discrete.txt");
  const { state, reason } = parseAmdSysfs(card, {
    variable: "ROCR_VISIBLE_DEVICES",
    list: "GPU-1f",
  }, HOST);
  assertEquals([state, reason], [
    "unknown",
    "ROCR_VISIBLE_DEVICES lists GPU-1f, whose memory is not known",
  ]);
  assertEquals(parseAmdSysfs(card, hip("0"), HOST).devices.length, 1);
});

Deno.test("parseAmdSysfs() does not know the memory of a card whose numbers are missing or absurd", () => {
  const files = new Map(facts("linux-amd-discrete.txt"));
  files.set("/sys/class/drm/card0/device/mem_info_vram_used", "99999999999999");
  const why = /mem_info_vram_used (99999999999999|null)$/;
  assertMatch(`${brief(parseAmdSysfs(files, null, HOST).devices[0])[1]}`, why);
  files.delete("/sys/class/drm/card0/device/mem_info_vram_used");
  assertMatch(`${brief(parseAmdSysfs(files, null, HOST).devices[0])[1]}`, why);
  assertEquals(parseAmdSysfs(files, hip(""), HOST).state, "absent");
  assertEquals(parseAmdSysfs(new Map(), null, HOST).state, "absent");
});

Deno.test("parseRocmSmi() reads numbers that are texts, after warnings", () => {
  const { devices } = parseRocmSmi(printed(fixture("rocm-smi.txt")), null);
  assertEquals(devices.map(brief), [
    ["discrete", (25753026560 - 294256640) / MIB, 25753026560 / MIB],
    ["discrete", (17163091968 - 10809344) / MIB, 17163091968 / MIB],
  ]);
  assertEquals(parseRocmSmi(printed(fixture("rocm-smi.txt")), hip("1")).devices.length, 1);
});

Deno.test("parseRocmSmi() does not know what it cannot read", () => {
  assertEquals(parseRocmSmi({ problem: "is not installed" }, null).state, "absent");
  const odd = [
    '{"card0": {"VRAM Total Memory (B)": "N/A", "VRAM Total Used Memory (B)": "0"}}',
    "{}",
  ];
  const states = [
    printed(fixture("rocm-smi-no-driver.txt"), 255),
    printed(fixture("rocm-smi-no-driver.txt")),
    printed(odd[1] ?? ""),
    printed("{torn"),
  ].map((output) => parseRocmSmi(output, null).state);
  assertEquals(states, ["unknown", "unknown", "unknown", "unknown"]);
  assertEquals(parseRocmSmi(printed(odd[0] ?? ""), null).devices[0]?.free_bytes, null);
});

Deno.test("parseIntelSysfs() knows what is free with i915 alone, and leaves integrated GPUs out", () => {
  const { devices } = parseIntelSysfs(facts("linux-intel.txt"));
  assertEquals(devices.map((device) => device.id), ["card1", "card2"]);
  assertEquals(brief(devices[0]), ["discrete", 16106127360 / MIB, 17079205888 / MIB]);
  assertEquals(brief(devices[1]), [
    "discrete",
    "the driver does not tell how much of it is free",
    12288,
  ]);
  assertEquals(parseIntelSysfs(facts("linux-amd-apu.txt")).state, "absent");
});

Deno.test("parseAppleSysctl() uses the limit that is set, and estimates the default", () => {
  const usable = (stdout: string) => {
    const { devices } = parseAppleSysctl(printed(apple(stdout)));
    return [(devices[0]?.free_bytes ?? 0) / MIB, devices[0]?.note?.startsWith("an estimate")];
  };
  assertEquals(usable("137438953472\n0\n"), [96 * 1024, true]);
  assertEquals(usable("38654705664\n0\n"), [24 * 1024, true]);
  assertEquals(usable("17179869184\n0\n"), [Math.floor(17179869184 * 2 / 3) / MIB, true]);
  assertEquals(usable("137438953472\n122880\n"), [120 * 1024, false]);
  // More than there is cannot be wired.
  assertEquals(usable("17179869184\n999999\n"), [16 * 1024, false]);
});

Deno.test("parseAppleSysctl() estimates the system's limit where macOS has no such setting yet", () => {
  const old = parseAppleSysctl(printed("hw.memsize: 17179869184\nhw.optional.arm64: 1\n", 1));
  assertEquals(brief(old.devices[0]), ["integrated", 10922.666666030884, 10922.666666030884]);
  assertMatch(`${old.devices[0]?.note}`, /^an estimate of the system's own limit/);
});

Deno.test("parseAppleSysctl() knows nothing on a Mac without an Apple GPU or with odd words", () => {
  const intel = parseAppleSysctl(printed("hw.memsize: 17179869184\n", 1));
  assertEquals(intel.state, "unknown");
  assertMatch(`${intel.reason}`, /only a Mac with an Apple GPU/);
  for (
    const [stdout, code] of [["", 1], ["hw.memsize: lots\n", 0], ["hw.memsize: 0\n", 0]] as const
  ) {
    const { state, reason } = parseAppleSysctl(printed(stdout, code));
    assertEquals([state, reason?.startsWith("sysctl ")], ["unknown", true]);
  }
  assertEquals(parseAppleSysctl({ problem: "is not installed" }).state, "unknown");
});

Deno.test("parseWindowsRegistry() reads sizes above 4 GiB, and never those of 32 bits", () => {
  const { devices } = parseWindowsRegistry(printed(fixture("windows-registry.txt")));
  assertEquals(devices.map((device) => (device.total_bytes ?? 0) / MIB), [24560, 512]);
  assert(devices.every((device) => device.free_bytes === null && device.unknown_reason !== null));
  assertEquals(
    parseWindowsRegistry(printed(fixture("windows-registry-32-bit.txt"))).state,
    "absent",
  );
  assertEquals(parseWindowsRegistry({ problem: "gave no answer within 5 s" }).state, "unknown");
});

Deno.test("parseWindowsMemory() reads free and total KiB", () => {
  assertEquals(parseWindowsMemory(printed("8388608 16777216\r\n")), readingOf(16 * GIB, 8 * GIB));
  const reasons = [
    printed("nothing\r\n"),
    printed("8388608 16777216\r\n", 1),
    printed("8388608\r\n"),
    { problem: "is not installed" },
  ].map((output) => parseWindowsMemory(output).unknown_reason);
  assertEquals(reasons, [
    "powershell printed nothing",
    "powershell exited with 1: 8388608 16777216",
    "powershell printed 8388608",
    "powershell is not installed",
  ]);
});

Deno.test("parseWindows() asks the registry only where nvidia-smi knows no card", () => {
  const smi = printed(fixture("nvidia-two-cards.txt"));
  const registry = printed(fixture("windows-registry.txt"));
  const memory = printed("8388608 16777216\r\n");
  const kinds = (smi: ProbeOutput) =>
    parseWindows({ smi, registry, memory }, null).map(({ probe, devices }) =>
      `${probe} ${devices.length}`
    );
  assertEquals(kinds(smi), ["nvidia 2", "cpu 1"]);
  assertEquals(kinds({ problem: "is not installed" }), ["nvidia 0", "windows 2", "cpu 1"]);
});

Deno.test("parseHostMemory() takes what is available, not what is free, and cuts it to the control groups", () => {
  const plain = parseHostMemory(facts("linux-amd-discrete.txt"));
  assertEquals(plain.free_bytes, 58123456 * 1024);
  // Version 2: the limit of the parent, its droppable cache not counted as used.
  const v2 = parseHostMemory(facts("linux-cgroup-v2.txt"));
  assertEquals(v2.free_bytes, 17179869184 - (10737418240 - 7516192768));
  assertEquals(v2.total_bytes, 16 * GIB);
  assertEquals(v2.note, "limited by control group /sys/fs/cgroup/user.slice");
  // Version 1: the enormous number of the child means none.
  const v1 = parseHostMemory(facts("linux-cgroup-v1.txt"));
  assertEquals(v1.free_bytes, 8 * GIB - (6 * GIB - 3 * GIB));
});

/** A machine of 8 TiB, 6 of them available, in a control group of version 2 with these files. */
function inGroup(group: Record<string, string>, folder = "/sys/fs/cgroup/a") {
  const entries = Object.entries(group).map(([name, text]) => [`${folder}/${name}`, text] as const);
  const tib = 2 ** 30;
  const meminfo = `MemTotal: ${8 * tib} kB\nMemAvailable: ${6 * tib} kB`;
  const host = parseHostMemory(new Map([["/proc/meminfo", meminfo], ...entries]));
  return [host.free_bytes ?? host.unknown_reason, host.total_bytes];
}

Deno.test("parseHostMemory() minds a limit however large, and what is used above it", () => {
  const tib = 2 ** 40;
  assertEquals(inGroup({ "memory.max": `${4 * tib}`, "memory.current": "0" }), [4 * tib, 4 * tib]);
  assertEquals(inGroup({ "memory.max": "max", "memory.current": "5" }), [6 * tib, 8 * tib]);
  assertEquals(inGroup({ "memory.max": "5000", "memory.current": "6000" }), [0, 5000]);
  // The cache cannot be more than what is used, whenever the two were read.
  const stat = "inactive_anon 1\ninactive_file 9000";
  const busy = { "memory.max": "5000", "memory.current": "4000", "memory.stat": stat };
  assertEquals(inGroup(busy), [5000, 5000]);
  assertEquals(inGroup({ "memory.max": "9" }), [
    "the use of /sys/fs/cgroup/a is unreadable",
    8 * tib,
  ]);
  // No limit: nobody needs to know what is used.
  assertEquals(inGroup({ "memory.limit_in_bytes": "9223372036854771712" }), [6 * tib, 8 * tib]);
});

Deno.test("parseHostMemory() takes the tightest of nested groups", () => {
  const groups = ["", "/a", "/a/b"].map((path) => `/sys/fs/cgroup/memory${path}`);
  const files = groups.flatMap((folder, index) => [
    [`${folder}/memory.limit_in_bytes`, `${[9000, 5000, 8000][index]}`] as const,
    [`${folder}/memory.usage_in_bytes`, `${[1000, 500, 400][index]}`] as const,
  ]);
  const meminfo = "MemTotal: 64 kB\nMemAvailable: 32 kB";
  const host = parseHostMemory(new Map([["/proc/meminfo", meminfo], ...files]));
  assertEquals([host.free_bytes, host.total_bytes, host.note], [
    4500,
    5000,
    "limited by control group /sys/fs/cgroup/memory/a",
  ]);
});

Deno.test("parseHostMemory() does not guess where the kernel does not tell", () => {
  for (const meminfo of ["", "MemTotal: 1024 kB\nMemFree: 512 kB", "MemAvailable: 1024 kB"]) {
    const { free_bytes, unknown_reason } = parseHostMemory(new Map([["/proc/meminfo", meminfo]]));
    assertEquals([free_bytes, unknown_reason], [null, "/proc/meminfo tells no MemAvailable"]);
  }
});

// From here on: the program itself, with stand-ins on PATH.

/** Puts stand-ins in front of the system's programs: nvidia-smi, and what /proc and /sys hold. */
function fakeMachine(scratch: Scratch, { smi, linux }: { smi?: string; linux?: string }): void {
  if (smi !== undefined) writeScript(join(scratch.bin, "nvidia-smi"), smi);
  if (linux === undefined) return;
  // The program asks for these facts with `sh -c`; every other use of sh goes to the real one.
  writeScript(
    join(scratch.bin, "sh"),
    `#!/bin/sh\ncase $2 in *meminfo*) exec cat '${
      fixturePath(linux)
    }' ;; *) exec /bin/sh "$@" ;; esac\n`,
  );
}

/** Asks the program about a model on this machine as faked. */
async function ask(scratch: Scratch, env: Record<string, string> = {}, ...more: string[]) {
  const path = writeFamily(scratch, "Qwen3-8B");
  const args = ["--json", "--model", path, ...more];
  const result = await runProgram(scratch, "vram-detect", args, { env });
  return { result, report: lastJson(result) };
}

/** The same through peak.ts, which adds the memory taken at most to stderr. */
async function askForPeak(scratch: Scratch) {
  const path = writeFamily(scratch, "Qwen3-8B");
  const argv = [Deno.execPath(), "run", "-qA", "--config", join(ROOT, "deno.json")];
  const result = await run(scratch, [...argv, fixturePath("peak.ts"), "--json", "--model", path]);
  return { result, report: lastJson(result) };
}

const catSmi = (name: string, code = 0) =>
  `#!/bin/sh\n/bin/cat '${fixturePath(name)}'\nexit ${code}\n`;

Deno.test("vram-detect adds the cards of nvidia-smi up and honours CUDA_VISIBLE_DEVICES", async () => {
  using scratch = makeScratch();
  fakeMachine(scratch, { smi: catSmi("nvidia-two-cards.txt"), linux: "linux-amd-apu.txt" });
  const both = (await ask(scratch)).report;
  assertEquals(at(both, "budget", "pool"), "discrete");
  assertEquals(at(both, "budget", "total_bytes"), (23802 - 1024 + 11754 - 1024) * MIB);
  const one = (await ask(scratch, { CUDA_VISIBLE_DEVICES: "1" })).report;
  assertEquals(at(one, "budget", "total_bytes"), (11754 - 1024) * MIB);
  // None visible: the GPU that shares the machine's memory is next.
  const none = (await ask(scratch, { CUDA_VISIBLE_DEVICES: "" })).report;
  assertEquals(at(none, "budget", "pool"), "integrated");
});

Deno.test("vram-detect gives null with nvidia-smi's words when the driver does not match", async () => {
  using scratch = makeScratch();
  fakeMachine(scratch, { smi: catSmi("nvidia-mismatch.txt", 18), linux: "linux-cgroup-v2.txt" });
  const { result, report } = await ask(scratch);
  assertEquals([result.code, report.available_context_tokens, report.loop_mode_eligible], [
    1,
    null,
    false,
  ]);
  assertMatch(
    `${report.reason}`,
    /exited with 18: Failed to initialize NVML: Driver\/library version/,
  );
  assertMatch(`${report.hint}`, /--free-mib/);
});

Deno.test("vram-detect does not take a driver without nvidia-smi for a machine without a card", async () => {
  using scratch = makeScratch();
  const name = join(scratch.dir, "facts.txt");
  writeFile(
    name,
    `${fixture("linux-cgroup-v2.txt")}\n==> /proc/driver/nvidia/version\nNVRM version\n`,
  );
  writeScript(join(scratch.bin, "sh"), `#!/bin/sh\nexec cat '${name}'\n`);
  const { result, report } = await ask(scratch);
  assertEquals(result.code, 1);
  assertMatch(`${report.reason}`, /there is an NVIDIA card, but nvidia-smi is not installed/);
});

Deno.test("vram-detect measures a machine without a card by its memory and control groups", async () => {
  using scratch = makeScratch();
  fakeMachine(scratch, { linux: "linux-cgroup-v2.txt" });
  const { result, report } = await ask(scratch);
  assertEquals([result.code, at(report, "budget", "pool")], [0, "cpu"]);
  assertEquals(at(report, "budget", "total_bytes"), 17179869184 - (10737418240 - 7516192768) - GIB);
  assertEquals(report.available_context_tokens, 40960);
});

Deno.test(
  "vram-detect reads this machine's own memory",
  { ignore: Deno.build.os !== "linux" },
  async () => {
    using scratch = makeScratch();
    const { report } = await ask(scratch);
    const probes = at(report, "probes");
    assert(Array.isArray(probes));
    const cpu: unknown = probes.find((probe) => at(probe, "probe") === "cpu");
    assertEquals(at(cpu, "state"), "found");
    const total =
      Number(/^MemTotal:\s+(\d+) kB$/m.exec(Deno.readTextFileSync("/proc/meminfo"))?.[1]) * 1024;
    const devices = at(report, "devices");
    assert(Array.isArray(devices));
    const host: unknown = devices.find((device) => at(device, "kind") === "cpu");
    const free = Number(at(host, "free_bytes"));
    assert(free > 0 && free <= total, `${free} of ${total}`);
  },
);

Deno.test("vram-detect says when the files of Linux cannot be read, and trusts a card all the same", async () => {
  using scratch = makeScratch();
  writeScript(join(scratch.bin, "sh"), "#!/bin/sh\necho broken >&2\nexit 3\n");
  const { result, report } = await ask(scratch);
  assertEquals(result.code, 1);
  assertMatch(`${report.reason}`, /\/proc and \/sys could not be read: sh exited with 3: broken$/);
  writeScript(
    join(scratch.bin, "nvidia-smi"),
    catSmi("nvidia-two-cards.txt"),
  );
  assertEquals(at((await ask(scratch)).report, "budget", "pool"), "discrete");
});

Deno.test("vram-detect does not measure a container of 512 MiB by the machine around it", async () => {
  using scratch = makeScratch();
  const name = join(scratch.dir, "facts.txt");
  const group =
    "==> /sys/fs/cgroup/memory.max\n536870912\n==> /sys/fs/cgroup/memory.current\n4096\n";
  writeFile(name, `==> /proc/meminfo\nMemTotal: 65768180 kB\nMemAvailable: 58123456 kB\n${group}`);
  writeScript(join(scratch.bin, "sh"), `#!/bin/sh\nexec cat '${name}'\n`);
  const { result, report } = await ask(scratch);
  assertEquals(result.code, 1);
  assertMatch(`${report.reason}`, /does not fit: 256 tokens need .*, the budget is 0\.00 MiB$/);
  assertEquals(at(report, "devices", 0, "note"), "limited by control group /sys/fs/cgroup");
});

Deno.test("vram-detect asks programs in English, and finds those that a scheduler's PATH lacks", async () => {
  using scratch = makeScratch();
  const smi = '#!/bin/sh\necho "$LC_ALL, $PATH"\nexit 7\n';
  fakeMachine(scratch, { smi, linux: "linux-cgroup-v2.txt" });
  const { report } = await ask(scratch, { LC_ALL: "de_DE.UTF-8", LANG: "de_DE.UTF-8" });
  const path = `${scratch.env.PATH}:/usr/lib/wsl/lib:/opt/rocm/bin:/usr/sbin`;
  assertStringIncludes(`${report.reason}`, `nvidia-smi exited with 7: C, ${path}`);
});

Deno.test("vram-detect honours ROCR_VISIBLE_DEVICES where HIP_VISIBLE_DEVICES is not set", async () => {
  using scratch = makeScratch();
  fakeMachine(scratch, { linux: "linux-cgroup-v2.txt" });
  writeScript(join(scratch.bin, "rocm-smi"), catSmi("rocm-smi.txt"));
  const { report } = await ask(scratch, { ROCR_VISIBLE_DEVICES: "1" });
  assertEquals(at(report, "devices", 0, "name"), "AMD card1");
  const env = { ROCR_VISIBLE_DEVICES: "1", HIP_VISIBLE_DEVICES: "0" };
  assertEquals(at((await ask(scratch, env)).report, "devices", 0, "name"), "AMD card0");
});

Deno.test("vram-detect asks rocm-smi where sysfs does not tell", async () => {
  using scratch = makeScratch();
  fakeMachine(scratch, { linux: "linux-cgroup-v2.txt" });
  writeScript(join(scratch.bin, "rocm-smi"), catSmi("rocm-smi.txt"));
  const { report } = await ask(scratch);
  assertEquals(at(report, "devices", 0, "name"), "AMD card0");
  assertEquals(at(report, "budget", "pool"), "discrete");
});

Deno.test("vram-detect is not disturbed by an inherited LD_LIBRARY_PATH and hands none on", async () => {
  using scratch = makeScratch();
  const smi = `#!/bin/sh\n[ -z "$LD_LIBRARY_PATH$LD_PRELOAD" ] || exit 18\n${
    catSmi("nvidia-two-cards.txt").slice(10)
  }`;
  fakeMachine(scratch, { smi });
  const { result, report } = await ask(scratch, { LD_LIBRARY_PATH: "/usr/local/cuda/lib64/stubs" });
  assertEquals([result.code, at(report, "budget", "pool")], [0, "discrete"], result.stderr);
});

Deno.test("vram-detect ends a probe that hangs, with all that it started, and says so", async () => {
  using scratch = makeScratch();
  const pidFile = join(scratch.dir, "pid");
  // The descendant keeps the pipes open.
  const smi = `#!/bin/sh\ntrap '' TERM\nsleep 600 &\necho $! >'${pidFile}'\nwait\n`;
  fakeMachine(scratch, { smi, linux: "linux-cgroup-v2.txt" });
  const { result, report } = await ask(scratch);
  assertEquals(result.code, 1);
  assertMatch(`${report.reason}`, /nvidia-smi gave no answer within 5 s/);
  const pid = Number(Deno.readTextFileSync(pidFile));
  await poll("end of the probe's descendant", () => !isAlive(pid));
});

Deno.test("vram-detect ends a probe that prints without end, its own memory bounded", async () => {
  using scratch = makeScratch();
  fakeMachine(scratch, { smi: "#!/bin/sh\nexec yes nonsense\n", linux: "linux-cgroup-v2.txt" });
  const { result, report } = await askForPeak(scratch);
  assertMatch(`${report.reason}`, /nvidia-smi printed more than 4194304 bytes: nonsense$/);
  const kib = Number(/^VmHWM:\s+(\d+) kB$/m.exec(result.stderr)?.[1]);
  assert(kib > 0 && kib < 200_000, result.stderr);
});
