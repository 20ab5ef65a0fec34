/**
 * Stand-in for `@std/assert` 1.0.19: the assertions that the tests use, over `node:assert`.
 *
 * @module
 */

import { AssertionError, deepStrictEqual, notDeepStrictEqual } from "node:assert";

/** A class of errors. */
type ErrorClass<E extends Error> = abstract new (...args: never[]) => E;

/**
 * Requires a value to be truthy.
 *
 * @param expression The value.
 * @param message What to say otherwise.
 */
export function assert(expression: unknown, message = ""): asserts expression {
  if (!expression) fail(message || "Expected a truthy value");
}

/**
 * Requires two values to have the same structure and content.
 *
 * @param actual What was found.
 * @param expected What should have been found.
 * @param message What to say otherwise, before the difference.
 */
export function assertEquals<T>(actual: T, expected: T, message?: string): void {
  try {
    deepStrictEqual(actual, expected);
  } catch (error) {
    throw explain(error, message);
  }
}

/**
 * Requires two values to differ.
 *
 * @param actual What was found.
 * @param expected What should not have been found.
 * @param message What to say otherwise.
 */
export function assertNotEquals<T>(actual: T, expected: T, message?: string): void {
  try {
    notDeepStrictEqual(actual, expected);
  } catch (error) {
    throw explain(error, message);
  }
}

/**
 * Requires a value that is neither null nor undefined.
 *
 * @param actual The value.
 * @param message What to say otherwise.
 */
export function assertExists<T>(actual: T, message?: string): asserts actual is NonNullable<T> {
  if (actual === undefined || actual === null) fail(message ?? `Expected a value, found ${actual}`);
}

/**
 * Requires a text to match a pattern.
 *
 * @param actual The text.
 * @param expected The pattern.
 * @param message What to say otherwise.
 */
export function assertMatch(actual: string, expected: RegExp, message?: string): void {
  if (!expected.test(actual)) fail(message ?? `Expected text to match ${expected}:\n${actual}`);
}

/**
 * Requires a text to hold another.
 *
 * @param actual The text.
 * @param expected What it must hold.
 * @param message What to say otherwise.
 */
export function assertStringIncludes(actual: string, expected: string, message?: string): void {
  if (!actual.includes(expected)) {
    fail(message ?? `Expected text to hold ${JSON.stringify(expected)}:\n${actual}`);
  }
}

/**
 * Requires a function to throw.
 *
 * @param fn The function.
 * @param errorClass The class that the error must belong to.
 * @param messageIncludes What its message must hold.
 * @param message What to say otherwise.
 * @returns The error.
 */
export function assertThrows<E extends Error = Error>(
  fn: () => unknown,
  errorClass?: ErrorClass<E>,
  messageIncludes?: string,
  message?: string,
): E {
  try {
    fn();
  } catch (error) {
    return checkError(error, { errorClass, messageIncludes, message });
  }
  return fail(message ?? "Expected function to throw");
}

/**
 * Requires a promise to be rejected.
 *
 * @param fn Makes the promise.
 * @param errorClass The class that the error must belong to.
 * @param messageIncludes What its message must hold.
 * @param message What to say otherwise.
 * @returns The error.
 */
export async function assertRejects<E extends Error = Error>(
  fn: () => PromiseLike<unknown>,
  errorClass?: ErrorClass<E>,
  messageIncludes?: string,
  message?: string,
): Promise<E> {
  let promise: PromiseLike<unknown>;
  try {
    promise = fn();
  } catch (error) {
    return fail(message ?? `Expected a rejected promise, but the function threw: ${error}`);
  }
  try {
    await promise;
  } catch (error) {
    return checkError(error, { errorClass, messageIncludes, message });
  }
  return fail(message ?? "Expected promise to be rejected");
}

/**
 * Fails a test.
 *
 * @param message Why.
 */
export function fail(message = "Failed"): never {
  throw new AssertionError({ message });
}

function checkError<E extends Error>(error: unknown, expected: {
  errorClass: ErrorClass<E> | undefined;
  messageIncludes: string | undefined;
  message: string | undefined;
}): E {
  const { errorClass, messageIncludes = "", message } = expected;
  if (!(error instanceof (errorClass ?? Error))) {
    return fail(message ?? `Expected ${errorClass?.name ?? "an Error"}, found ${error}`);
  }
  if (!error.message.includes(messageIncludes)) {
    return fail(
      message ?? `Expected message to hold ${JSON.stringify(messageIncludes)}: ${error.message}`,
    );
  }
  return error as E;
}

function explain(error: unknown, message: string | undefined): unknown {
  if (error instanceof AssertionError && message !== undefined) {
    error.message = `${message}\n${error.message}`;
  }
  return error;
}
