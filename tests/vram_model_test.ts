/** The model of memory: ground truth, every family of architectures, properties of the answer. */
import { assert, assertEquals, assertThrows } from "@std/assert";
import { fc } from "./deps.ts";
import { buildFamily, buildModel, FAMILIES, type MetadataValue } from "./gguf_builder.ts";
import { cardOf, F16, GIB, MIB, readBytes, shapeOf } from "./vram_support.ts";
import {
  type CacheSettings,
  computeBudget,
  describeModel,
  largestContext,
  listRaises,
  memoryAtContext,
  type ModelShape,
  RefusedError,
} from "../scripts/vram-detect.ts";

const mib = (bytes: number) => (bytes / MIB).toFixed(2);

/** Memory of a family for a context, weights aside. */
function memoryOf(family: string, contextTokens: number, settings: CacheSettings = F16) {
  return memoryAtContext({ shape: shapeOf(family), weightsBytes: 0 }, settings, contextTokens);
}

/** Family, context, MiB of full-context KV, of sliding-window KV: llama.cpp's logs, 2026-09. */
const GROUND_TRUTH: [string, number, string, string][] = [
  ["Llama-3-8B", 8192, "1024.00", "0.00"],
  ["Mistral-7B-v0.2", 2048, "256.00", "0.00"],
  ["Qwen2.5-7B", 2048, "112.00", "0.00"],
  ["Qwen3-8B", 40960, "5760.00", "0.00"],
  ["Qwen3-30B-A3B", 4096, "384.00", "0.00"],
  ["Phi-4", 2048, "400.00", "0.00"],
  ["gpt-oss-20b", 131072, "3072.00", "18.00"],
  ["DeepSeek-V3", 8192, "549.00", "0.00"],
  ["DeepSeek-V3 without the _mla keys", 8192, "39040.00", "0.00"],
  ["Gemma-3-12B", 8192, "512.00", "480.00"],
  ["Qwen3.5-9B", 135168, "4224.00", "0.00"],
];

for (const [family, context, kv, kvSwa] of GROUND_TRUTH) {
  Deno.test(`memoryAtContext() gives ${family} at ${context} tokens exactly ${kv} + ${kvSwa} MiB`, () => {
    const memory = memoryOf(family, context);
    assertEquals([mib(memory.kv_bytes), mib(memory.kv_swa_bytes)], [kv, kvSwa]);
  });
}

Deno.test("memoryAtContext() gives the logged compute buffers of Llama-3-8B and gpt-oss-20b", () => {
  assertEquals(mib(memoryOf("Llama-3-8B", 0).compute_bytes), "258.50");
  assertEquals(mib(memoryOf("gpt-oss-20b", 0).compute_bytes), "398.38");
  assertEquals(mib(memoryOf("Llama-3-8B", 8192).compute_bytes), "274.50");
});

/** Family, MiB at 8192 tokens of full-context KV, sliding-window KV, recurrent state. */
const OTHER_FAMILIES: [string, string, string, string][] = [
  // 21 of 42 layers slide over 4096 + 512 tokens.
  ["Gemma-2-9B", "1344.00", "756.00", "0.00"],
  // 20 of 35 layers hold KV; of those 4 are full, 16 slide over 512 + 512 tokens.
  ["Gemma-3n-E4B", "64.00", "32.00", "0.00"],
  // The full layer is among the two that share; sliding heads are half as wide.
  ["Gemma-4 pattern", "0.00", "8.00", "0.00"],
  ["Llama-4-Scout", "384.00", "1152.00", "0.00"],
  ["Command-R7B", "256.00", "432.00", "0.00"],
  ["OLMo-2 with window", "1024.00", "1728.00", "0.00"],
  ["Jamba", "32.00", "0.00", "4.16"],
  ["Granite-4-hybrid", "16.00", "0.00", "13.84"],
  ["LFM2", "32.00", "0.00", "0.06"],
  ["Qwen3-Next", "192.00", "0.00", "75.38"],
  ["Mamba", "0.00", "0.00", "23.75"],
  ["RWKV-6", "0.00", "0.00", "33.00"],
  // 47 blocks, one of which only predicts.
  ["GLM-4.5 with a prediction layer", "1472.00", "0.00", "0.00"],
];

for (const [family, kv, kvSwa, recurrent] of OTHER_FAMILIES) {
  Deno.test(`memoryAtContext() counts the layers of ${family}`, () => {
    const memory = memoryOf(family, 8192);
    assertEquals(
      [mib(memory.kv_bytes), mib(memory.kv_swa_bytes), mib(memory.recurrent_bytes)],
      [kv, kvSwa, recurrent],
    );
  });
}

Deno.test("memoryAtContext() multiplies windows and recurrent state by the slots, full cells not", () => {
  const four = { ...F16, slots: 4 };
  // 4 · 128 + 512 = 1024 cells instead of 768 (128 + 512, padded).
  assertEquals(mib(memoryOf("gpt-oss-20b", 131072, four).kv_swa_bytes), "24.00");
  assertEquals(memoryOf("gpt-oss-20b", 131072, four).kv_bytes, 3072 * MIB);
  assertEquals(
    memoryOf("Qwen3.5-9B", 8192, four).recurrent_bytes,
    4 * memoryOf("Qwen3.5-9B", 8192).recurrent_bytes,
  );
});

Deno.test("memoryAtContext() gives a short context no more window cells than it has, padded to 256", () => {
  assertEquals(mib(memoryOf("gpt-oss-20b", 256).kv_swa_bytes), "6.00");
  assertEquals(mib(memoryOf("gpt-oss-20b", 257).kv_swa_bytes), "12.00");
});

Deno.test("memoryAtContext() knows every cache type, and no other tensor type", () => {
  const bytesOf = (type: string) =>
    memoryOf("Llama-3-8B", 1, { ...F16, kvTypeK: type, kvTypeV: type }).kv_bytes / 64;
  const types = ["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"];
  assertEquals(types.map(bytesOf), [4096, 2048, 2048, 1088, 768, 704, 640, 576, 576]);
  for (const type of ["q3_k", "i8", "constructor", ""]) {
    assertThrows(() => bytesOf(type), RefusedError, `Cannot use cache type "${type}"`);
  }
});

Deno.test("memoryAtContext() takes K and V types apart", () => {
  const mixed = { ...F16, kvTypeK: "q8_0", kvTypeV: "q4_0" };
  assertEquals(memoryOf("Llama-3-8B", 8192, mixed).kv_bytes, 32 * 8192 * (1088 + 576));
});

Deno.test("describeModel() flags an unknown architecture as an upper bound with every layer full", () => {
  const shape = shapeOf("an unknown architecture");
  assertEquals(shape.upperBounds.length, 1);
  assert(shape.layers.every((layer) => !layer.isSliding && layer.keyElements === 1024));
});

Deno.test("describeModel() assumes the largest vocabulary, as an upper bound, where none is named", () => {
  const { architecture, keys } = FAMILIES["Llama-3-8B"]!;
  const { vocab_size: _, ...others } = keys;
  const shape = describeModel(readBytes(buildModel(architecture, others)));
  assertEquals(shape.vocabTokens, 262400);
  assertEquals(shape.upperBounds.length, 1);
});

Deno.test("describeModel() counts the tokens that a file lists before those that it claims", () => {
  const header = readBytes(buildFamily("Llama-3-8B"));
  assertEquals(describeModel({ ...header, vocabTokens: 128000 }).vocabTokens, 128000);
  assertEquals(describeModel({ ...header, vocabTokens: null }).vocabTokens, 128256);
  // A list of none is no vocabulary.
  assertEquals(describeModel({ ...header, vocabTokens: 0 }).vocabTokens, 128256);
});

Deno.test("describeModel() derives the head's size from the embedding only where no length is given", () => {
  assertEquals(shapeOf("Llama-3-8B").layers[0]?.keyElements, 8 * 128);
  // 2048 / 32 would be 64.
  assertEquals(shapeOf("Qwen3-30B-A3B").layers[0]?.keyElements, 4 * 128);
});

/** A llama file with some keys changed; undefined takes one away. */
function describeChanged(
  changes: Record<string, MetadataValue | undefined>,
  family = "Llama-3-8B",
) {
  const { architecture, keys } = FAMILIES[family]!;
  const entries = Object.entries<MetadataValue | undefined>({ ...keys, ...changes });
  const kept = entries.filter((entry): entry is [string, MetadataValue] => entry[1] !== undefined);
  return describeModel(readBytes(buildModel(architecture, Object.fromEntries(kept))));
}

Deno.test("describeModel() reads a period as well as a list of sliding layers, and a period of 0 as all", () => {
  const sliding = (pattern: MetadataValue) =>
    describeChanged({ "attention.sliding_window_pattern": pattern }, "Gemma-3-12B").layers
      .map((layer) => layer.isSliding ? "s" : "F").join("").slice(0, 8);
  assertEquals(sliding(4), "sssFsssF");
  assertEquals(sliding(1), "FFFFFFFF");
  assertEquals(sliding(0), "ssssssss");
  assertEquals(sliding(Array.from({ length: 48 }, (_, i) => i % 2 === 0)), "sFsFsFsF");
});

Deno.test("describeModel() leaves the window aside where the architecture ignores it or it is 0", () => {
  assertEquals(shapeOf("Mistral-7B-v0.2").windowTokens, 0);
  assertEquals(shapeOf("Phi-4").windowTokens, 0);
  assertEquals(describeChanged({ "attention.sliding_window": 0 }, "Gemma-3-12B").windowTokens, 0);
  assertEquals(describeChanged({ "attention.sliding_window": 0 }, "Llama-4-Scout").windowTokens, 0);
  assertEquals(shapeOf("Llama-4-Scout").windowTokens, 8192);
});

const REFUSED: [string, Record<string, MetadataValue | undefined>, RegExp, string?][] = [
  ["no block_count", { "block_count": undefined }, /llama\.block_count is missing/],
  ["no layers", { "block_count": 0 }, /0 layers/],
  ["more layers than any model", { "block_count": 4000 }, /4000 layers/],
  ["no heads", {
    "attention.head_count": undefined,
    "attention.head_count_kv": undefined,
  }, /llama\.attention\.head_count is missing/],
  ["a text for a number", { "block_count": "32" }, /llama\.block_count is "32"/],
  [
    "a fraction for a number",
    { "block_count": { type: "f32", value: 31.5 } },
    /block_count is 31\.5/,
  ],
  ["a negative number", { "attention.head_count_kv": { type: "i32", value: -1 } }, /is -1/],
  [
    "too few heads for the layers",
    { "attention.head_count_kv": [8, 8] },
    /has 2 entries for 32 layers/,
  ],
  ["one of the two _mla lengths", { "attention.key_length_mla": 192 }, /only one of the two _mla/],
  ["an indexer", { "attention.indexer.head_count": 64 }, /indexer/],
  ["an architecture with an indexer", {}, /indexer/, "DeepSeek-V3.2"],
  [
    "a state in an unknown architecture",
    { "ssm.state_size": 16 },
    /recurrent/,
    "an unknown architecture",
  ],
  ["an attention interval of 0", { "full_attention_interval": 0 }, /interval is 0/, "Qwen3.5-9B"],
  [
    "a recurrent model without its sizes",
    { "ssm.inner_size": undefined },
    /ssm\.inner_size is missing/,
    "Mamba",
  ],
];

for (const [what, changes, message, family] of REFUSED) {
  Deno.test(`describeModel() refuses ${what}`, () => {
    const error = assertThrows(() => describeChanged(changes, family), RefusedError);
    assert(message.test(error.message), error.message);
  });
}

Deno.test("computeBudget() keeps the larger of 1024 MiB and 3% back from each card, once", () => {
  const budget = computeBudget([cardOf(20 * GIB, 24 * GIB), cardOf(70 * GIB, 80 * GIB)]);
  assertEquals(budget.terms.map((term) => term.headroom_bytes), [
    1024 * MIB,
    Math.ceil(80 * GIB * 0.03),
  ]);
  assertEquals(budget.total_bytes, 19 * GIB + 70 * GIB - Math.ceil(80 * GIB * 0.03));
});

Deno.test("computeBudget() never adds pools: cards first, then the shared GPU, then the machine", () => {
  const card = cardOf(8 * GIB, 8 * GIB);
  const shared = { ...cardOf(60 * GIB, 64 * GIB), kind: "integrated" as const };
  const host = { ...cardOf(50 * GIB, 64 * GIB), kind: "cpu" as const };
  assertEquals(computeBudget([host, shared, card]).total_bytes, 7 * GIB);
  assertEquals(computeBudget([host, shared]).pool, "integrated");
  assertEquals(computeBudget([host]).pool, "cpu");
});

Deno.test("computeBudget() counts the largest of several views of shared memory, and 3% of all of it", () => {
  const views = [30, 50, 40].map((gib) => ({
    ...cardOf(gib * GIB, 100 * GIB),
    kind: "integrated" as const,
    name: `${gib}`,
  }));
  const budget = computeBudget(views);
  assertEquals(budget.terms.map((term) => [term.device, term.headroom_bytes]), [["50", 3 * GIB]]);
  assertEquals(budget.total_bytes, 47 * GIB);
});

Deno.test("computeBudget() does not take an unknown card for an absent one", () => {
  const unknown = cardOf(null, null);
  const host = { ...cardOf(50 * GIB, 64 * GIB), kind: "cpu" as const };
  const error = assertThrows(() => computeBudget([unknown, host]), RefusedError);
  assert(error.message.includes("for a test"), error.message);
  // Another card answers: its memory counts.
  assertEquals(computeBudget([unknown, cardOf(8 * GIB, 8 * GIB)]).total_bytes, 7 * GIB);
  assertThrows(() => computeBudget([]), RefusedError, "no device was found");
});

Deno.test("computeBudget() passes over a card that could hold nothing, and never goes below 0", () => {
  const screen = cardOf(400 * MIB, 1024 * MIB);
  const host = { ...cardOf(50 * GIB, 64 * GIB), kind: "cpu" as const };
  assertEquals(computeBudget([screen, host]).pool, "cpu");
  assertEquals(computeBudget([cardOf(2000 * MIB, 2048 * MIB), host]).total_bytes, 976 * MIB);
  // The machine's own memory counts however little it is.
  assertEquals(computeBudget([{ ...cardOf(MIB, 9 * MIB), kind: "cpu" }]).total_bytes, 0);
  assertEquals(
    computeBudget([cardOf(100 * MIB, 8 * GIB), cardOf(8 * GIB, 8 * GIB)]).total_bytes,
    7 * GIB,
  );
});

const families = Object.keys(FAMILIES).filter((name) => name !== "DeepSeek-V3.2");
const shapes = new Map<string, ModelShape>(families.map((name) => [name, shapeOf(name)]));
const settings = fc.record({
  kvTypeK: fc.constantFrom("f32", "f16", "q8_0", "q4_0"),
  kvTypeV: fc.constantFrom("f16", "q8_0", "q5_1", "iq4_nl"),
  slots: fc.integer({ min: 1, max: 16 }),
  ubatchTokens: fc.constantFrom(64, 512, 2048),
});
const model = fc.record({
  family: fc.constantFrom(...families),
  weightsBytes: fc.integer({ min: 0, max: 400 * GIB }),
});

function modelOf({ family, weightsBytes }: { family: string; weightsBytes: number }) {
  return { shape: shapes.get(family)!, weightsBytes };
}

Deno.test("largestContext() fits when applied forwards, and one token more does not", () => {
  fc.assert(fc.property(model, settings, fc.integer({ min: 0, max: 500 * GIB }), (m, s, budget) => {
    const tokens = largestContext(modelOf(m), s, budget);
    const native = modelOf(m).shape.nativeTokens ?? 0;
    assert(tokens >= 0 && tokens <= native);
    if (tokens > 0) assert(memoryAtContext(modelOf(m), s, tokens).total_bytes <= budget);
    if (tokens < native) assert(memoryAtContext(modelOf(m), s, tokens + 1).total_bytes > budget);
  }));
});

Deno.test("largestContext() uses a budget to its last byte", () => {
  for (const family of ["Llama-3-8B", "gpt-oss-20b", "Qwen3.5-9B"]) {
    const one = { shape: shapeOf(family), weightsBytes: 12345 };
    for (const tokens of [1, 255, 256, 257, 4000, 8191]) {
      const { total_bytes } = memoryAtContext(one, F16, tokens);
      const found = largestContext(one, F16, total_bytes);
      assertEquals([found >= tokens, largestContext(one, F16, total_bytes - 1) < found], [
        true,
        true,
      ]);
      assertEquals(memoryAtContext(one, F16, found).total_bytes, total_bytes);
    }
  }
});

Deno.test("the answer grows with free memory and never with the weights", () => {
  const free = fc.integer({ min: 0, max: 500 * GIB });
  fc.assert(fc.property(model, settings, free, free, (m, s, one, other) => {
    const answer = (bytes: number, more = 0) => {
      const budget = computeBudget([cardOf(bytes, 500 * GIB)]);
      assert(budget.total_bytes <= Math.max(0, bytes - GIB));
      const { weightsBytes } = m;
      return largestContext(
        modelOf({ ...m, weightsBytes: weightsBytes + more }),
        s,
        budget.total_bytes,
      );
    };
    assert(answer(Math.min(one, other)) <= answer(Math.max(one, other)));
    assert(answer(one, GIB) <= answer(one));
  }));
});

Deno.test("listRaises() proposes only what helps", () => {
  const llama = { shape: shapeOf("Llama-3-8B"), weightsBytes: 4 * GIB };
  assertEquals(listRaises(llama, F16, 5 * GIB), [
    "--kv-type q8_0: 8192 tokens",
    "--kv-type q4_0: 8192 tokens",
    "a model file 1 GiB smaller: 8192 tokens",
    "1 GiB more free memory: 8192 tokens",
  ]);
  assertEquals(listRaises(llama, F16, 50 * GIB), [
    "nothing: 8192 tokens is the model's native context",
  ]);
  // A head of 80 is no whole number of blocks.
  const odd = { shape: describeChanged({ "attention.key_length": 80 }), weightsBytes: 4 * GIB };
  assertEquals(listRaises(odd, F16, 5 * GIB), [
    "a model file 1 GiB smaller: 8192 tokens",
    "1 GiB more free memory: 8192 tokens",
  ]);
  const windowed = { shape: shapeOf("gpt-oss-20b"), weightsBytes: 0 };
  const lines = listRaises(windowed, { ...F16, slots: 16 }, GIB);
  assert(lines.some((line) => line.startsWith("--slots 1: ")), lines.join("\n"));
});
