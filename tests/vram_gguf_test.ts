/** The GGUF reader: what it accepts, what it refuses by name and offset, and what nothing may do to it. */
import { assert, assertEquals, assertMatch, assertThrows } from "@std/assert";
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import { fc } from "./deps.ts";
import { lastJson, makeScratch, ROOT, run, runProgram, type Scratch } from "./helpers.ts";
import {
  buildFamily,
  buildGguf,
  buildGgufParts,
  buildModel,
  dataBytes,
  FAMILIES,
  type GgufSpec,
  GgufWriter,
  metadataOf,
  type MetadataValue,
  ONE_TENSOR,
  type TensorSpec,
} from "./gguf_builder.ts";
import { at, F16, GIB, MIB, readBytes, sourceOf } from "./vram_support.ts";
import {
  describeModel,
  type GgufFile,
  listShards,
  memoryAtContext,
  readGguf,
  RefusedError,
} from "../scripts/vram-detect.ts";

const LLAMA = FAMILIES["Llama-3-8B"]!;
const TENSORS: TensorSpec[] = [
  { name: "token_embd.weight", shape: [64, 100], type: 8 },
  { name: "blk.0.attn_k.weight", shape: [256, 3], type: 12 },
  { name: "blk.1.attn_norm.weight", shape: [5], type: 0 },
  { name: "output_norm.weight", shape: [7], type: 1 },
];
/** A small whole file with every kind of value, and where its lengths stand. */
const SMALL: GgufSpec = {
  metadata: [
    ...metadataOf("llama", { ...LLAMA.keys, "block_count": 2 }),
    ["a.u8", { type: "u8", value: 200 }],
    ["a.i8", { type: "i8", value: -3 }],
    ["a.u16", { type: "u16", value: 60000 }],
    ["a.i16", { type: "i16", value: -30000 }],
    ["a.i32", { type: "i32", value: -70000 }],
    ["a.f32", { type: "f32", value: 0.5 }],
    ["a.f64", { type: "f64", value: 0.25 }],
    ["a.u64", { type: "u64", value: 2n ** 40n }],
    ["a.i64", { type: "i64", value: -5n }],
    ["a.bool", true],
    ["a.numbers", [1, 2, 3]],
    ["tokenizer.ggml.tokens", ["a", "bc", "", "déf"]],
    ["tokenizer.chat_template", "x".repeat(300)],
  ],
  tensors: TENSORS,
};

Deno.test("readGguf() reads every kind of value, the vocabulary's length and the tensors' bytes", () => {
  for (const version of [2, 3]) {
    const file = readBytes(buildGguf({ ...SMALL, version }));
    assertEquals(file.version, version);
    const value = (key: string) => file.values.get(key);
    assertEquals(
      ["u8", "i8", "u16", "i16", "i32", "f32", "f64", "u64", "i64", "bool"].map((t) =>
        value(`a.${t}`)
      ),
      [200, -3, 60000, -30000, -70000, 0.5, 0.25, 2 ** 40, -5, 1],
    );
    assertEquals(value("general.architecture"), "llama");
    assertEquals(file.vocabTokens, 4);
    // 64·100 in q8_0, 256·3 in q4_k, 5 in f32, 7 in f16.
    assertEquals([file.tensorCount, file.weightsBytes], [4, 6800 + 432 + 20 + 14]);
    assertEquals(file.surplusBytes, 0);
  }
});

Deno.test("readGguf() steps over arrays that say nothing about memory, and over long texts", () => {
  const file = readBytes(buildGguf(SMALL));
  const keys = ["a.numbers", "tokenizer.ggml.tokens", "tokenizer.chat_template"];
  assertEquals(keys.map((key) => file.values.get(key)), [null, null, null]);
});

Deno.test("readGguf() takes the vocabulary from the token embedding where no tokens are listed", () => {
  const spec = { metadata: metadataOf("llama", {}), tensors: TENSORS.slice(0, 1) };
  assertEquals(readBytes(buildGguf(spec)).vocabTokens, 100);
});

Deno.test("readGguf() honours general.alignment", () => {
  const wrong = {
    metadata: [["general.alignment", 48]] as GgufSpec["metadata"],
    tensors: [ONE_TENSOR],
  };
  assertMatch(refuse(buildGguf(wrong)), /general\.alignment of 48/);
  // With an alignment of 8 the second tensor starts at 24, not at 32.
  const spec = {
    metadata: [["general.alignment", 8]] as GgufSpec["metadata"],
    tensors: [{ ...TENSORS[2]! }, { ...TENSORS[3]!, offset: 24 }],
  };
  assertEquals(readBytes(buildGguf(spec)).tensorCount, 2);
});

/** The message with which bytes are refused. */
function refuse(bytes: Uint8Array): string {
  return assertThrows(() => readBytes(bytes), RefusedError).message;
}

/** A file of one key whose value is written by hand. */
function withValue(write: (writer: GgufWriter) => void): Uint8Array {
  const writer = new GgufWriter();
  writer.scalar("u32", 0x46554747);
  writer.scalar("u32", 3);
  writer.length(0);
  writer.length(1);
  writer.text("k");
  write(writer);
  for (let index = 0; index < 8; index++) writer.scalar("u64", 0);
  return writer.finish();
}

/** Bytes with some of them overwritten. */
function patch(bytes: Uint8Array, offset: number, ...values: number[]): Uint8Array {
  const copy = bytes.slice();
  copy.set(values, offset);
  return copy;
}

const small = buildGguf(SMALL);
const swapped = patch(small, 4, 0, 0, 0, 3);
const DAMAGED: [string, Uint8Array, RegExp][] = [
  ["an empty file", new Uint8Array(0), /ends inside the magic number at offset 0/],
  [
    "another magic number",
    patch(small, 0, 0x47, 0x47, 0x4d, 0x4c),
    /no GGUF magic number at offset 0/,
  ],
  ["version 1", patch(small, 4, 1), /version 1, only 2 and 3 are known at offset 4/],
  ["version 4", patch(small, 4, 4), /version 4, only 2 and 3 are known at offset 4/],
  ["version 0", patch(small, 4, 0), /version 0/],
  ["swapped bytes", swapped, /big-endian file \(its bytes are swapped\) at offset 4/],
  [
    "a negative count",
    patch(small, 15, 0xff),
    /number of tensors is negative or above 2\^53 at offset 8/,
  ],
  [
    "a count beyond the file",
    patch(small, 16, 255, 255),
    /number of keys is 65535, past the end of the file at offset 16/,
  ],
  [
    "an array of arrays",
    withValue((w) => (w.scalar("u32", 9), w.scalar("u32", 9))),
    /"k" is an array of arrays at offset 37/,
  ],
  [
    "an array of an unknown type",
    withValue((w) => (w.scalar("u32", 9), w.scalar("u32", 77))),
    /"k" is an array of type 77 at offset 37/,
  ],
  [
    "a value of an unknown type",
    withValue((w) => w.scalar("u32", 13)),
    /"k" of type 13 at offset 33/,
  ],
  [
    "a length over 2^30",
    withValue((w) => (w.scalar("u32", 8), w.length(2 ** 30 + 1))),
    /is 1073741825, above 2\^30 at offset 37/,
  ],
  [
    "an array past the end",
    withValue((w) => (w.scalar("u32", 9), w.scalar("u32", 5), w.length(400))),
    /is 400, past the end of the file at offset 41/,
  ],
  [
    "a boolean of 2",
    withValue((w) => (w.scalar("u32", 7), w.scalar("u8", 2))),
    /"k" is a boolean of value 2 at offset 37/,
  ],
  [
    "a text that is not UTF-8",
    withValue((w) => (w.scalar("u32", 8), w.length(1), w.scalar("u8", 0xff))),
    /"k" is not UTF-8 at offset 45/,
  ],
  ["an empty key", buildGguf({ metadata: [["", 1]] }), /a key of 0 bytes at offset 24/],
  [
    "a key that is too long",
    buildGguf({ metadata: [["k".repeat(2000), 1]] }),
    /a key of 2000 bytes at offset 24/,
  ],
  [
    "a duplicate key",
    buildGguf({ metadata: [["k", 1], ["k", 2]] }),
    /a key "k" a second time at offset 41/,
  ],
  [
    "a duplicate tensor",
    buildGguf({ metadata: [], tensors: [ONE_TENSOR, ONE_TENSOR] }),
    /a tensor's name "output_norm\.weight" a second time/,
  ],
  [
    "a nameless tensor",
    buildGguf({ metadata: [], tensors: [{ ...ONE_TENSOR, name: "" }] }),
    /a tensor's name of 0 bytes/,
  ],
  [
    "a tensor's name of 64 bytes",
    buildGguf({ metadata: [], tensors: [{ ...ONE_TENSOR, name: "n".repeat(64) }] }),
    /name of 64 bytes/,
  ],
  [
    "a tensor of five dimensions",
    buildGguf({ metadata: [], tensors: [{ ...ONE_TENSOR, shape: [1, 1, 1, 1, 1] }] }),
    /with 5 dimensions/,
  ],
  [
    "a dimension of 0",
    buildGguf({ metadata: [], tensors: [{ ...ONE_TENSOR, shape: [0] }] }),
    /a dimension of 0/,
  ],
  [
    "a removed tensor type",
    buildGguf({ metadata: [], tensors: [{ ...ONE_TENSOR, type: 31 }] }),
    /of type 31/,
  ],
  [
    "rows that do not fill blocks",
    buildGguf({ metadata: [], tensors: [{ ...ONE_TENSOR, type: 8, shape: [33] }] }),
    /rows of 33, no multiple of the block of q8_0/,
  ],
  [
    "a tensor larger than the file",
    buildGguf({ metadata: [], tensors: [{ ...ONE_TENSOR, shape: [2 ** 40] }], hasData: false }),
    /more than the file holds/,
  ],
  [
    "sizes that overflow",
    buildGguf({
      metadata: [],
      tensors: [{ ...ONE_TENSOR, shape: [2 ** 52, 2 ** 52, 2 ** 52, 2 ** 52] }],
      hasData: false,
    }),
    /more than the file holds/,
  ],
  [
    "overlapping tensors",
    buildGguf({ metadata: [], tensors: [ONE_TENSOR, { ...TENSORS[3]!, name: "b", offset: 0 }] }),
    /data at 0, not 128/,
  ],
  ["missing data", small.subarray(0, small.length - 40), /past the end of the file at \d+/],
  [
    "a tensor of a block that is not counted",
    buildGguf({ metadata: metadataOf("llama", { "block_count": 1 }), tensors: TENSORS }),
    /tensors of block 1, but block_count 1/,
  ],
];

for (const [what, bytes, message] of DAMAGED) {
  Deno.test(`readGguf() refuses ${what}`, () => {
    const text = refuse(bytes);
    assertMatch(text, message);
    assertMatch(text, /^Cannot read GGUF file "test\.gguf": .* at offset \d+$/);
  });
}

/** A header of so many keys of so many letters, and of so many tensors that are zeros. */
function headerOf({ keys = 0, tensors = 0, letters = 1 }): Uint8Array {
  const writer = new GgufWriter();
  writer.scalar("u32", 0x46554747);
  writer.scalar("u32", 3);
  writer.length(tensors);
  writer.length(keys);
  for (let index = 0; index < keys; index++) {
    writer.text(`${index}`.padEnd(letters, "k"));
    writer.value(true);
  }
  const head = writer.finish();
  const whole = new Uint8Array(head.length + tensors);
  whole.set(head);
  return whole;
}

Deno.test("readGguf() holds to its limits, not one less and not one more", () => {
  assertEquals(readBytes(headerOf({ keys: 4096 })).values.size, 4096);
  assertMatch(refuse(headerOf({ keys: 4097 })), /: 4097 keys at offset 16$/);
  assertEquals(readBytes(headerOf({ keys: 1, letters: 1024 })).values.size, 1);
  assertMatch(refuse(headerOf({ keys: 1, letters: 1025 })), /a key of 1025 bytes/);
  // As many tensors as are allowed are read until one of them is wrong.
  assertMatch(refuse(headerOf({ tensors: 131072 })), /: a tensor's name of 0 bytes at offset 24$/);
  assertMatch(refuse(headerOf({ tensors: 131073 })), /: 131073 tensors at offset 8$/);
  const four = [{ ...ONE_TENSOR, shape: [2, 2, 2, 2] }];
  assertEquals(readBytes(buildGguf({ metadata: [], tensors: four })).weightsBytes, 64);
  const text = (length: number) =>
    readBytes(buildGguf({ metadata: [["k", "x".repeat(length)]] })).values.get("k");
  assertEquals([text(256), text(257)], ["x".repeat(256), null]);
});

Deno.test("readGguf() takes lengths up to 2^30 and counts up to 2^53 for what they are", () => {
  const file = (length: number) =>
    withValue((w) => (w.scalar("u32", 9), w.scalar("u32", 0), w.length(length)));
  const grow = (bytes: Uint8Array) =>
    readGguf({ ...sourceOf(bytes), sizeBytes: 2 ** 31 }, "test.gguf");
  assertEquals(grow(file(2 ** 30)).values.get("k"), null);
  assertThrows(() => grow(file(2 ** 30 + 1)), RefusedError, "is 1073741825, above 2^30");
  assertMatch(refuse(file(2 ** 53 - 1)), /is 9007199254740991, above 2\^30/);
  assertMatch(refuse(file(2 ** 53)), /is negative or above 2\^53/);
});

Deno.test("readGguf() takes an alignment of up to 1 MiB", () => {
  const aligned = (value: number) =>
    buildGguf({ metadata: [["general.alignment", value]], tensors: [ONE_TENSOR] });
  const source = { ...sourceOf(aligned(2 ** 20)), sizeBytes: 2 ** 21 };
  assertEquals(readGguf(source, "test.gguf").tensorCount, 1);
  for (const value of [2 ** 21, 0, 3]) {
    assertMatch(refuse(aligned(value)), new RegExp(`general\\.alignment of ${value} at`));
  }
  const text = buildGguf({ metadata: [["general.alignment", "x".repeat(300)]] });
  assertMatch(refuse(text), /general\.alignment of null at/);
});

Deno.test("readGguf() counts what follows the last tensor beyond padding, from one alignment on", () => {
  const whole = buildGguf({ metadata: [], tensors: [ONE_TENSOR] });
  const longer = (bytes: number) => {
    const copy = new Uint8Array(whole.length + bytes);
    copy.set(whole);
    const { weightsBytes, surplusBytes } = readBytes(copy);
    return [weightsBytes, surplusBytes];
  };
  assertEquals([longer(31), longer(32)], [[128, 0], [160, 32]]);
  // A list of tensors that says "none" does not make the data disappear.
  const none = patch(whole, 8, 0);
  assert(readBytes(none).weightsBytes > 128);
});

Deno.test("readGguf() refuses a header of more than 64 MiB after reading no more than that", () => {
  // Texts of one byte: all of the array has to be walked through.
  const items = 8 * MIB;
  const size = 24 + 9 + 4 + 4 + 8 + items * 9;
  const head = withValue((w) => (w.scalar("u32", 9), w.scalar("u32", 8), w.length(items))).subarray(
    0,
    49,
  );
  let readBytes = 0;
  const source = {
    sizeBytes: size,
    readAt(offset: number, into: Uint8Array): number {
      for (let index = 0; index < into.length; index++) {
        const at = offset + index;
        into[index] = at < 49 ? head[at]! : (at - 49) % 9 === 0 ? 1 : 0;
      }
      readBytes += into.length;
      return into.length;
    },
  };
  const error = assertThrows(() => readGguf(source, "big.gguf"), RefusedError);
  assertMatch(error.message, /the header is larger than 67108864 bytes/);
  assert(readBytes <= 64 * MIB + 64 * 1024, `${readBytes} bytes read`);
});

Deno.test("readGguf() refuses a small file cut at every offset", () => {
  for (let size = 0; size < small.length - 18; size++) refuse(small.subarray(0, size));
  // Only the padding after the last tensor's 14 bytes may be missing.
  assertEquals(readBytes(small.subarray(0, small.length - 18)).tensorCount, 4);
});

/** What a file leads to: the memory that its model needs. */
function measure(file: GgufFile): string {
  const model = { shape: describeModel(file), weightsBytes: file.weightsBytes };
  return JSON.stringify(memoryAtContext(model, F16, 4096));
}

/** Reads and measures damaged bytes: a refusal is null, anything else but an answer fails the test. */
function tryMeasure(bytes: Uint8Array): { file: GgufFile; memory: string } | null {
  try {
    const file = readBytes(bytes);
    const memory = measure(file);
    for (const value of Object.values(JSON.parse(memory))) {
      assert(typeof value === "number" && Number.isInteger(value) && value >= 0, memory);
    }
    return { file, memory };
  } catch (error) {
    if (error instanceof RefusedError) return null;
    throw error;
  }
}

Deno.test("readGguf() refuses a file whose lengths have grown, each by each amount", () => {
  const { bytes, lengthOffsets } = buildGgufParts(SMALL);
  assert(lengthOffsets.length > 40, `${lengthOffsets.length}`);
  const view = (copy: Uint8Array) => new DataView(copy.buffer);
  for (const offset of lengthOffsets) {
    const old = view(bytes).getBigUint64(offset, true);
    for (const growth of [1n, 7n, 4096n, 2n ** 20n, 2n ** 30n, 2n ** 31n, 2n ** 53n, 2n ** 62n]) {
      const copy = bytes.slice();
      view(copy).setBigUint64(offset, BigInt.asUintN(64, old + growth), true);
      const result = tryMeasure(copy);
      // A tensor of the same size in other dimensions, and one that ends in the padding, stay true.
      if (result !== null) assertEquals(result.file.tensorCount, 4, `offset ${offset}, +${growth}`);
      if (result !== null) assert(growth < 16n, `offset ${offset}, +${growth}: ${result.memory}`);
    }
  }
});

Deno.test("readGguf() survives every byte flipped, every bit of it", () => {
  const original = readBytes(small);
  let answered = 0;
  for (let offset = 0; offset < small.length; offset++) {
    for (let bit = 0; bit < 8; bit++) {
      const result = tryMeasure(patch(small, offset, small[offset]! ^ (1 << bit)));
      if (result === null) continue;
      answered++;
      // A tensor list that tells less than the file holds never makes the weights smaller.
      const { file } = result;
      assert(file.weightsBytes >= original.weightsBytes - 31, `${offset}.${bit}`);
      // Of magic number, version and counts: version 2 for 3, and fewer tensors than there are.
      if (offset < 24) assert(offset === 4 || file.tensorCount < 4, `${offset}.${bit}`);
    }
  }
  // Names, texts and numbers can be changed without a trace, and so can the data.
  assert(answered > 0 && answered < small.length * 8);
});

Deno.test("200,000 mutated headers: no crash, no hang, nothing but whole numbers or a refusal", () => {
  const sources = [
    "Llama-3-8B",
    "gpt-oss-20b",
    "Qwen3.5-9B",
    "Jamba",
    "DeepSeek-V3",
    "Gemma-4 pattern",
  ]
    .map(buildFamily).concat(small);
  // A generator of its own: fast-check's would take most of the time.
  let state = 20260901;
  const random = (limit: number) => {
    state = Math.imul(state ^ (state >>> 15), 0x2c1b3c6d) + 0x9e3779b9 | 0;
    return (state >>> 0) % limit;
  };
  let refused = 0;
  for (let round = 0; round < 200_000; round++) {
    const bytes = sources[round % sources.length]!.slice();
    for (let change = random(4); change >= 0; change--) {
      const offset = random(bytes.length);
      const special = [0, 1, 0x7f, 0x80, 0xff, bytes[offset]! + 1, random(256)];
      bytes[offset] = special[random(special.length)]!;
    }
    const cut = random(20) === 0 ? random(bytes.length) : bytes.length;
    if (tryMeasure(bytes.subarray(0, cut)) === null) refused++;
  }
  assert(refused > 50_000, `${refused} refused`);
});

Deno.test("readGguf() never throws anything but a refusal on arbitrary bytes", () => {
  const bytes = fc.uint8Array({ maxLength: 400 });
  fc.assert(
    fc.property(bytes, fc.boolean(), (tail, hasHead) => {
      tryMeasure(hasHead ? Uint8Array.from([...small.subarray(0, 24), ...tail]) : tail);
    }),
    { numRuns: 2000 },
  );
});

Deno.test("listShards() names all files of a sharded model from any of them", () => {
  const all = ["/m/a-00001-of-00003.gguf", "/m/a-00002-of-00003.gguf", "/m/a-00003-of-00003.gguf"];
  for (const path of all) assertEquals(listShards(path), all);
  assertEquals(listShards("/m/a.gguf"), ["/m/a.gguf"]);
  assertEquals(listShards("/m/a-00001-of-00000.gguf"), ["/m/a-00001-of-00000.gguf"]);
});

/** Writes the three shards of a model; `change` alters the split keys of one. */
function writeShards(
  folder: string,
  change: (number: number) => Record<string, MetadataValue | undefined> = () => ({}),
): string[] {
  return [1, 2, 3].map((number) => {
    const split = { "split.no": number - 1, "split.count": 3, "split.tensors.count": 3 };
    const entries = Object.entries<MetadataValue | undefined>({ ...split, ...change(number) });
    const keys = entries.filter((entry): entry is [string, MetadataValue] =>
      entry[1] !== undefined
    );
    const own = number === 1 ? metadataOf("llama", LLAMA.keys) : [];
    const path = join(folder, `m-0000${number}-of-00003.gguf`);
    const tensors = [TENSORS[number - 1]!];
    Deno.writeFileSync(path, buildGguf({ metadata: [...own, ...keys], tensors }));
    return path;
  });
}

/** Asks the program about a file; what it says of weights and files, or its reason. */
async function askOf(scratch: Scratch, path: string): Promise<unknown> {
  const args = ["--json", "--free-mib", "8000", "--model", path];
  const result = await runProgram(scratch, "vram-detect", args);
  const report = lastJson(result);
  assertEquals(result.code, report.reason === null || report.reason === FLOOR ? 0 : 1);
  if (result.code === 1) return report.reason;
  return [at(report, "memory", "weights_bytes"), at(report, "model", "files")];
}

const FLOOR = "a context window of 8192 tokens is below the floor of 16000 tokens for loops";

Deno.test("a sharded model's weights are those of all shards, whichever is named, also behind links", async () => {
  using scratch = makeScratch();
  const paths = writeShards(scratch.project);
  for (const path of paths) assertEquals(await askOf(scratch, path), [6800 + 432 + 20, 3]);
  // As in a cache of downloads: links with the right names to files with others.
  const cache = join(scratch.dir, "cache");
  Deno.mkdirSync(cache);
  for (const [index, path] of paths.entries()) {
    Deno.renameSync(path, join(cache, `blob${index}`));
    Deno.symlinkSync(join(cache, `blob${index}`), path);
  }
  assertEquals(await askOf(scratch, paths[1]!), [6800 + 432 + 20, 3]);
  // A link with a name of its own hides that there are more files.
  const link = join(scratch.project, "model.gguf");
  Deno.symlinkSync(paths[0]!, link);
  assertMatch(
    `${await askOf(scratch, link)}`,
    /model\.gguf": by its name shard 0 \(from 0\) of 1, in it split\.no is 0, split\.count 3$/,
  );
});

Deno.test("a sharded model is refused when a shard is missing, renamed, doubled, cut or no file", async () => {
  using scratch = makeScratch();
  const dir = scratch.project;
  const second = join(dir, "m-00002-of-00003.gguf");
  const third = join(dir, "m-00003-of-00003.gguf");
  const cases: [string, () => void, RegExp][] = [
    ["missing", () => Deno.removeSync(third), /m-00003-of-00003\.gguf": no such file$/],
    ["doubled", () => Deno.copyFileSync(second, third), /m-00003.*split\.no is 1, split\.count 3$/],
    [
      "of another set",
      () => writeShards(dir, (number) => number === 3 ? { "split.count": 4 } : {}),
      /m-00003.*split\.no is 2, split\.count 4$/,
    ],
    [
      "without a number",
      () => writeShards(dir, (number) => number === 2 ? { "split.no": undefined } : {}),
      /m-00002.*split\.no is missing, split\.count 3$/,
    ],
    [
      "one tensor short",
      () => writeShards(dir, () => ({ "split.tensors.count": 4 })),
      /m-00001.*: 3 of 4 tensors$/,
    ],
    ["cut", () => Deno.truncateSync(third, 200), /m-00003.*at offset \d+$/],
    [
      "a pipe",
      () => {
        Deno.removeSync(second);
        new Deno.Command("mkfifo", { args: [second] }).outputSync();
      },
      /m-00002-of-00003\.gguf": not a regular file$/,
    ],
  ];
  for (const [what, damage, reason] of cases) {
    for (const path of [second, third]) if (existsSync(path)) Deno.removeSync(path);
    writeShards(dir);
    damage();
    assertMatch(`${await askOf(scratch, join(dir, "m-00001-of-00003.gguf"))}`, reason, what);
  }
});

Deno.test("a 70 GB sparse file with a true header is answered with under 100 MB resident", async () => {
  using scratch = makeScratch();
  const path = join(scratch.project, "huge.gguf");
  const weight = (name: string): TensorSpec => ({ name, shape: [8192, 1024 * 1024], type: 1 });
  const tensors = [0, 1, 2, 3].map((index) => weight(`blk.${index}.ffn_up.weight`));
  const metadata = metadataOf("llama", LLAMA.keys);
  metadata.push(["tokenizer.ggml.tokens", Array.from({ length: 1000 }, (_, i) => `token ${i}`)]);
  const header = buildGguf({ metadata, tensors, hasData: false });
  Deno.writeFileSync(path, header);
  Deno.truncateSync(path, header.length + dataBytes(tensors));
  assert(Deno.statSync(path).size > 68 * GIB / 1.1);

  const peak = join(ROOT, "tests", "fixtures", "vram", "peak.ts");
  const argv = [Deno.execPath(), "run", "-qA", "--config", join(ROOT, "deno.json"), peak];
  const result = await run(scratch, [...argv, "--json", "--free-mib", "100000", "--model", path]);
  assertEquals(result.code, 0, result.stderr);
  assertEquals(at(lastJson(result), "memory", "weights_bytes"), 64 * GIB);
  assertEquals(lastJson(result).available_context_tokens, 8192);
  const kib = Number(/^VmHWM:\s+(\d+) kB$/m.exec(result.stderr)?.[1]);
  assert(kib > 0 && kib < 100_000, result.stderr);
});

Deno.test("readGguf() reads only the header's part of a large file", () => {
  const bytes = buildModel(LLAMA.architecture, LLAMA.keys);
  const file = readGguf({ ...sourceOf(bytes), sizeBytes: 70 * GIB }, "huge.gguf");
  assertEquals(file.readBytes, bytes.length);
});
