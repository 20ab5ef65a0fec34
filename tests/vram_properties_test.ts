/** Properties of vram-detect's parsers: whatever a program prints or a file holds, no crash and no wish. */
import { assert, assertEquals } from "@std/assert";
import { join } from "@std/path";
import { fc } from "./deps.ts";
import { ROOT } from "./helpers.ts";
import { F16, GIB, MIB, shapeOf, sourceOf } from "./vram_support.ts";
import {
  computeBudget,
  describeModel,
  type DetectReport,
  type DeviceReport,
  memoryAtContext,
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

const HOST = { totalBytes: 64 * GIB, availableBytes: 32 * GIB, unknownReason: null, note: null };

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
    end: fc.constant("exited" as const),
    code: fc.constantFrom(0, 0, 0, 1, 9, 18),
    stdout: text,
    stderr: text,
  }),
  fc.constantFrom<ProbeOutput>(
    { end: "missing" },
    { end: "timeout", deadlineMs: 5000 },
    { end: "failed", message: "no" },
  ),
);

/** What holds of every device: a value that is a part of the total, or unknown with a reason. */
function checkDevice(device: DeviceReport): void {
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
  devices.forEach(checkDevice);
  assertEquals(reason === null, state === "found");
  if (state === "found") assert(devices.length > 0);
  if (state === "absent") assertEquals(devices, []);
}

/** Variables as a person may set them. */
const visible = fc.option(
  fc.oneof(fc.constantFrom("", "0", "1,0", "GPU-5a", "MIG-1", "all"), fc.string()),
);

Deno.test("device parsers give a value, unknown with a reason, or absent, on any text", () => {
  fc.assert(
    fc.property(output, visible, fc.constantFrom(HOST, null), (printed, shown, host) => {
      checkReport(parseNvidiaSmi(printed, shown, host));
      checkReport(parseRocmSmi(printed, shown));
      checkReport(parseAppleSysctl(printed));
      checkReport(parseWindowsRegistry(printed));
      const memory = parseWindowsMemory(printed);
      assert(memory === null || Number.isInteger(memory.availableBytes));
      const files = parseLinuxFacts(printed.end === "exited" ? printed.stdout : "");
      checkReport(parseAmdSysfs(files, shown, host));
      checkReport(parseIntelSysfs(files));
      const machine = parseHostMemory(files);
      assert(machine === null || (machine.availableBytes ?? 0) >= 0);
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
    if (!(error instanceof RefusedError)) throw error;
    assert(error.message !== "" && error.hint !== "");
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

Deno.test("renderExplanation() lays any report out without blanks at the ends of lines", () => {
  const report: DetectReport = {
    schema_version: 1,
    available_context_tokens: 40960,
    available_context_kb: 40960,
    loop_mode_eligible: true,
    floor_tokens: 16000,
    reason: null,
    hint: null,
    source: "gguf",
    model: { name: "qwen3:8b", architecture: "qwen3", native_context_tokens: null },
    devices: [
      {
        id: "0",
        name: "NVIDIA GeForce RTX 4090",
        kind: "discrete",
        total_bytes: 24564 * MIB,
        free_bytes: 23802 * MIB,
        unknown_reason: null,
        note: null,
      },
      {
        id: "1",
        name: "Quadro K2000",
        kind: "discrete",
        total_bytes: null,
        free_bytes: null,
        unknown_reason: "nvidia-smi says memory.total [N/A], memory.free [N/A]",
        note: null,
      },
    ],
    probes: [],
    memory: { weights_bytes: 4096 * MIB, kv_bytes_per_token: 147456 },
    memory_at_context: memoryAtContext({ shape: shapeOf("Qwen3-8B"), weightsBytes: 0 }, F16, 40960),
    budget: null,
    assumptions: null,
    warnings: ["Quadro K2000: free memory unknown"],
  };
  assertEquals(
    renderExplanation(report, ["--slots 1: 50000 tokens"]),
    `Model
  name                   qwen3:8b
  architecture           qwen3
  native context tokens  unknown

Devices
  NVIDIA GeForce RTX 4090  23802.00 MiB  free of 24564.00 MiB, discrete
  Quadro K2000                  unknown  nvidia-smi says memory.total [N/A], memory.free [N/A]

Memory
  weights               4096.00 MiB
  KV cache, each token     147456 B

Answer
  context          40960 tokens  source: gguf
  fit for loops             yes  the floor is 16000 tokens
  at 40960 tokens   6144.75 MiB  weights 0.00 MiB, KV 5760.00 MiB, window 0.00 MiB, state 0.00 MiB, compute 384.75 MiB

What would raise it
  --slots 1: 50000 tokens

Warnings
  Quadro K2000: free memory unknown`,
  );
});
