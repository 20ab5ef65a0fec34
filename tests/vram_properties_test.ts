/** Properties of vram-detect's parsers: whatever a program prints or a file holds, no crash and no wish. */
import { assert, assertEquals } from "@std/assert";
import { join } from "@std/path";
import { fc } from "./deps.ts";
import { ROOT } from "./helpers.ts";
import { F16, GIB, MIB, shapeOf, sourceOf } from "./vram_support.ts";
import {
  computeBudget,
  describeModel,
  DetectReport,
  type DeviceReport,
  memoryAtContext,
  type MemoryReading,
  parseAmdSysfs,
  parseAppleSysctl,
  parseHfConfig,
  parseHostMemory,
  parseIntelSysfs,
  parseLinuxFacts,
  parseNvidiaSmi,
  parseOllamaManifest,
  parseOllamaName,
  parseRocmSmi,
  parseWindowsMemory,
  parseWindowsRegistry,
  type ProbeOutput,
  type ProbeReport,
  readSafetensorsBytes,
  RefusedError,
  renderExplanation,
} from "../scripts/vram-detect.ts";

const known = (total_bytes: number | null, free_bytes: number | null) => ({
  total_bytes,
  free_bytes,
  unknown_reason: null,
  note: null,
});
const HOST = { total_bytes: 64 * GIB, free_bytes: 32 * GIB, unknown_reason: null, note: null };
const BLIND = { ...HOST, free_bytes: null, unknown_reason: "not told" };

/** Texts that look like those of the fixtures, torn and shuffled. */
const fixtures = [...Deno.readDirSync(join(ROOT, "tests", "fixtures", "vram"))]
  .filter((entry) => entry.name.endsWith(".txt"))
  .map((entry) => Deno.readTextFileSync(join(ROOT, "tests", "fixtures", "vram", entry.name)));
const torn = fc.tuple(fc.constantFrom(...fixtures), fc.nat(), fc.nat(), fc.string())
  .map(([text, from, length, middle]) => {
    const start = from % (text.length + 1);
    return text.slice(0, start) + middle + text.slice(start + length % 40);
  });
const text = fc.oneof(fc.string(), torn);
const output: fc.Arbitrary<ProbeOutput> = fc.oneof(
  fc.record({
    code: fc.constantFrom(0, 0, 0, 1, 9, 18),
    stdout: text,
    stderr: text,
  }),
  fc.constantFrom<ProbeOutput>({ problem: "is not installed" }, {
    problem: "could not be run: no",
  }),
);

/** What holds of every memory: a value that is a part of the total, or unknown with a reason. */
function checkReading(device: MemoryReading): void {
  const { free_bytes: free, total_bytes: total, unknown_reason: reason } = device;
  if (free === null) assert(reason !== null && reason !== "", JSON.stringify(device));
  else {
    assertEquals(reason, null);
    assert(Number.isInteger(free) && free >= 0, JSON.stringify(device));
    assert(total !== null && free <= total, JSON.stringify(device));
  }
}

/** What holds of every report. */
function checkReport({ state, reason, devices }: ProbeReport): void {
  devices.forEach(checkReading);
  assertEquals(reason === null, state === "found");
  assertEquals(devices.length > 0, state === "found");
}

/** Variables as a person may set them. */
const visible = fc.option(
  fc.oneof(fc.constantFrom("", "0", "1,0", "GPU-5a", "MIG-1", "all"), fc.string())
    .map((list) => ({ variable: "SOME_VISIBLE_DEVICES", list })),
);

Deno.test("device parsers give a value, unknown with a reason, or absent, on any text", () => {
  fc.assert(
    fc.property(output, visible, fc.constantFrom(HOST, BLIND), (printed, shown, host) => {
      checkReport(parseNvidiaSmi(printed, shown, host));
      checkReport(parseRocmSmi(printed, shown));
      checkReport(parseAppleSysctl(printed));
      checkReport(parseWindowsRegistry(printed));
      checkReading(parseWindowsMemory(printed));
      const files = parseLinuxFacts("problem" in printed ? "" : printed.stdout);
      checkReport(parseAmdSysfs(files, shown, host));
      checkReport(parseIntelSysfs(files));
      checkReading(parseHostMemory(files));
    }),
    { numRuns: 3000 },
  );
});

Deno.test("computeBudget() never promises more than the free memory of one pool", () => {
  const device = fc.record({
    kind: fc.constantFrom("discrete", "integrated", "cpu", "what-if"),
    total: fc.integer({ min: 0, max: 200 * GIB }),
    free: fc.option(fc.integer({ min: 0, max: 200 * GIB })),
  }).map(({ kind, total, free }): DeviceReport => ({
    id: "x",
    name: "x",
    kind: kind as DeviceReport["kind"],
    total_bytes: total,
    free_bytes: free === null ? null : Math.min(free, total),
    unknown_reason: free === null ? "no" : null,
    note: null,
  }));
  fc.assert(fc.property(fc.array(device, { maxLength: 6 }), (devices) => {
    let budget;
    try {
      budget = computeBudget(devices);
    } catch (error) {
      assert(error instanceof RefusedError);
      return;
    }
    const pool = devices.filter((one) => one.kind === budget.pool);
    const free = pool.reduce((sum, one) => sum + (one.free_bytes ?? 0), 0);
    assert(budget.total_bytes >= 0 && budget.total_bytes <= free);
    for (const term of budget.terms) {
      assert(term.headroom_bytes >= 1024 * MIB);
      assertEquals(term.usable_bytes, Math.max(0, term.free_bytes - term.headroom_bytes));
    }
  }));
});

/** Runs; a refusal is an answer too. */
function allowRefusal(run: () => void): void {
  try {
    run();
  } catch (error) {
    const isKnown = error instanceof RefusedError || error instanceof SyntaxError;
    if (!isKnown || error.message === "") throw error;
  }
}

const HF_KEYS = [
  "num_hidden_layers",
  "hidden_size",
  "num_attention_heads",
  "num_key_value_heads",
  "head_dim",
  "vocab_size",
  "sliding_window",
  "sliding_window_pattern",
  "layer_types",
  "text_config",
  "kv_lora_rank",
  "qk_rope_head_dim",
  "attn_layer_period",
  "attn_layer_offset",
  "hybrid_override_pattern",
  "conv_L_cache",
  "mamba_d_state",
  "mamba_expand",
];

Deno.test("parseHfConfig() and describeModel() answer or refuse on any config.json", () => {
  const number = fc.oneof(fc.integer({ min: -5, max: 300 }), fc.double(), fc.integer());
  const value = fc.oneof(number, number, fc.string(), fc.constant(null), fc.array(fc.string()));
  const config = fc.dictionary(fc.constantFrom(...HF_KEYS), value, { maxKeys: 18 });
  const modelType = fc.constantFrom(
    "llama",
    "gemma3",
    "jamba",
    "qwen3_5",
    "deepseek_v3",
    "lfm2",
    "new",
  );
  fc.assert(
    fc.property(config, modelType, (fields, model_type) => {
      allowRefusal(() => {
        const shape = describeModel(parseHfConfig(JSON.stringify({ ...fields, model_type }), "c"));
        const memory = memoryAtContext({ shape, weightsBytes: 0 }, F16, 4096);
        assert(Object.values(memory).every((bytes) => bytes >= 0), JSON.stringify(memory));
      });
    }),
    { numRuns: 3000 },
  );
  fc.assert(fc.property(fc.string(), (any) => allowRefusal(() => parseHfConfig(any, "c"))));
});

Deno.test("readSafetensorsBytes() answers with what the file holds or refuses, on any bytes", () => {
  const header = fc.oneof(fc.json(), fc.string()).map((json) => new TextEncoder().encode(json));
  fc.assert(
    fc.property(
      header,
      fc.nat({ max: 5000 }),
      fc.integer({ min: -9, max: 9 }),
      (head, data, off) => {
        const bytes = new Uint8Array(8 + head.length + data);
        new DataView(bytes.buffer).setBigInt64(0, BigInt(head.length + off), true);
        bytes.set(head, 8);
        allowRefusal(() => assert(readSafetensorsBytes(sourceOf(bytes), "s") <= bytes.length));
      },
    ),
  );
});

Deno.test("parseOllamaName() never leads out of the models folder, parseOllamaManifest() names blobs only", () => {
  const part = fc.constantFrom("a", "..", ".", "", "b:1", "~", "/", "\\", "x y", "é", "-", "c.d");
  const name = fc.oneof(fc.string(), fc.array(part).map((parts) => parts.join("/")));
  fc.assert(
    fc.property(name, (given) => {
      const path = parseOllamaName(given);
      if (path === null) return;
      assertEquals(join("/m", path), `/m/${path}`);
      assertEquals(path.split("/").length, 5);
    }),
    { numRuns: 3000 },
  );
  fc.assert(fc.property(fc.json(), (json) => allowRefusal(() => parseOllamaManifest(json, "m"))));
});

const report = Object.assign(new DetectReport(), {
  available_context_tokens: 40960,
  loop_mode_eligible: true,
  source: "gguf",
  model: {
    name: "qwen3:8b",
    path: "/models/qwen3.gguf",
    files: 3,
    architecture: "qwen3",
    layers: 36,
    full_context_layers: 36,
    sliding_layers: 0,
    recurrent_layers: 0,
    native_context_tokens: null,
    is_upper_bound: false,
  },
  devices: [
    { id: "0", name: "RTX 4090", kind: "discrete", ...known(24564 * MIB, 23802 * MIB) },
    { id: "1", name: "RTX 3060", kind: "discrete", ...known(12288 * MIB, 11754 * MIB) },
    {
      ...{ id: "2", name: "Quadro\x1b[31m", kind: "discrete", ...known(null, null) },
      unknown_reason: "nvidia-smi says memory.total [N/A], memory.free [N/A]",
    },
  ],
  probes: [{ probe: "amd", state: "absent", reason: "no AMD card in /sys/class/drm" }],
  memory: { projector_bytes: 300 * MIB, kv_bytes_per_token: 147456, compute_bytes_per_token: 2048 },
  assumptions: { kv_type_k: "f16", kv_type_v: "q8_0", slots: 1, ubatch_tokens: 512 },
  warnings: ["a long remark that says why and what, ".repeat(3).trim()],
});
report.budget = {
  ...computeBudget(report.devices),
  exact_context_tokens: 41000,
  native_context_tokens: null,
  limited_by: "memory",
};
const need = memoryAtContext({ shape: shapeOf("Qwen3-8B"), weightsBytes: 4096 * MIB }, F16, 40960);

Deno.test("renderExplanation() lays the derivation out, wraps words and lets nothing steer the terminal", () => {
  assertEquals(
    renderExplanation({ report, need, raises: ["--slots 1: 50000 tokens"] }, 72),
    `Model
  name            qwen3:8b
  path            /models/qwen3.gguf (3 files)
  architecture    qwen3
  layers          36: 36 keep the whole context
  native context  unknown tokens
  run with        K in f16, V in q8_0, slots 1, ubatch 512

Devices
  RTX 4090     23802.00 MiB  free of 24564.00 MiB, discrete
  RTX 3060     11754.00 MiB  free of 12288.00 MiB, discrete
  Quadro?[31m       unknown  nvidia-smi says memory.total [N/A],
                             memory.free [N/A]
  amd                absent  no AMD card in /sys/class/drm

Need of 40960 tokens
  weights          4096.00 MiB  of it projector 300.00 MiB
  KV cache         5760.00 MiB  147456 bytes a token
  compute buffer    384.75 MiB  of it 2048 bytes a token
  together        10240.75 MiB

Budget: discrete
  RTX 4090  22778.00 MiB  23802.00 MiB free - 1024.00 MiB headroom
  RTX 3060  10730.00 MiB  11754.00 MiB free - 1024.00 MiB headroom
  together  33508.00 MiB

Answer
  context        40960 tokens, exactly 41000, limited by memory
  fit for loops  yes, the floor is 16000 tokens

What would raise it
  -  --slots 1: 50000 tokens

Warnings
  -  a long remark that says why and what, a long remark that says why
     and what, a long remark that says why and what,`,
  );
});

Deno.test("renderExplanation() keeps lines within the columns, without blanks at their ends", () => {
  fc.assert(fc.property(fc.integer({ min: 60, max: 140 }), fc.string(), (columns, words) => {
    const warnings = [words.replaceAll(/\S{20}/g, "$& ")];
    const detection = { report: Object.assign(new DetectReport(), report, { warnings }), need };
    const lines = renderExplanation({ ...detection, raises: [] }, columns).split("\n");
    assert(
      lines.every((line) => line.length <= columns && line === line.trimEnd()),
      lines.join("\n"),
    );
  }));
});
