package io.github.schedsvc.client.tool;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonNull;
import com.google.gson.JsonObject;
import com.google.gson.JsonPrimitive;
import java.math.BigInteger;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** Fills the requests of scripts, and compares answers with what scripts expect. */
final class Matching {
  private static final Pattern PART = Pattern.compile("\\w+");
  private static final Pattern INTEGER = Pattern.compile("-?\\d+");

  private Matching() {}

  /** Puts saved values in the place of "$name", and writes repetitions out. */
  static JsonElement fill(JsonElement value, Map<String, JsonElement> saved) {
    if (isText(value) && value.getAsString().startsWith("$")) {
      JsonElement found = saved.get(value.getAsString().substring(1));
      if (found == null) {
        throw new Mismatch("nothing was saved as " + value.getAsString());
      }
      return found;
    }
    if (value.isJsonArray()) {
      JsonArray filled = new JsonArray();
      value.getAsJsonArray().forEach(each -> filled.add(fill(each, saved)));
      return filled;
    }
    if (!value.isJsonObject()) {
      return value;
    }
    JsonObject object = value.getAsJsonObject();
    if (object.has("$repeat")) {
      JsonArray repeat = object.getAsJsonArray("$repeat");
      return repeated(repeat.get(0), repeat.get(1).getAsInt(), saved);
    }
    JsonObject filled = new JsonObject();
    object.entrySet().forEach(each -> filled.add(each.getKey(), fill(each.getValue(), saved)));
    return filled;
  }

  private static JsonElement repeated(
      JsonElement element, int times, Map<String, JsonElement> saved) {
    if (isText(element)) {
      return new JsonPrimitive(element.getAsString().repeat(times));
    }
    JsonArray copies = new JsonArray();
    for (int i = 0; i < times; i++) {
      copies.add(fill(element, saved));
    }
    return copies;
  }

  /** Follows a path such as "leases[0].state". */
  static JsonElement lookUp(JsonElement value, String path) {
    JsonElement found = value;
    for (Matcher part = PART.matcher(path); part.find(); ) {
      if (found.isJsonObject() && found.getAsJsonObject().has(part.group())) {
        found = found.getAsJsonObject().get(part.group());
      } else if (found.isJsonArray()
          && Integer.parseInt(part.group()) < found.getAsJsonArray().size()) {
        found = found.getAsJsonArray().get(Integer.parseInt(part.group()));
      } else {
        throw new Mismatch(path + " is not in the answer");
      }
    }
    return found;
  }

  /** Fails, with all differences, unless an answer matches. */
  static void check(JsonElement expected, JsonElement actual) {
    List<String> found = mismatches(expected, actual, "");
    if (!found.isEmpty()) {
      throw new Mismatch(String.join("; ", found));
    }
  }

  /** Returns the differences, one sentence each; none if it matches. */
  static List<String> mismatches(JsonElement expected, JsonElement actual, String path) {
    List<String> found = new ArrayList<>();
    if (expected.isJsonObject()) {
      JsonObject wanted = expected.getAsJsonObject();
      boolean isOperation = wanted.keySet().stream().anyMatch(key -> key.startsWith("$"));
      for (Map.Entry<String, JsonElement> each : wanted.entrySet()) {
        String key = each.getKey();
        if (isOperation && !holds(key, each.getValue(), actual)) {
          found.add(path + " is " + actual + ", which fails " + key + " " + each.getValue());
        } else if (!isOperation && !actual.isJsonObject()) {
          return List.of(path + " is " + actual + ", not an object");
        } else if (!isOperation) {
          JsonElement below = actual.getAsJsonObject().get(key);
          String name = path.isEmpty() ? key : path + "." + key;
          found.addAll(
              mismatches(each.getValue(), below == null ? JsonNull.INSTANCE : below, name));
        }
      }
    } else if (expected.isJsonArray()) {
      JsonArray wanted = expected.getAsJsonArray();
      if (!actual.isJsonArray() || actual.getAsJsonArray().size() != wanted.size()) {
        return List.of(path + " is " + actual + ", not a list of " + wanted.size());
      }
      for (int at = 0; at < wanted.size(); at++) {
        JsonElement element = actual.getAsJsonArray().get(at);
        found.addAll(mismatches(wanted.get(at), element, path + "[" + at + "]"));
      }
    } else if (!equal(expected, actual)) {
      found.add(path + " is " + bare(actual) + ", not " + bare(expected));
    }
    return found;
  }

  private static boolean matches(JsonElement expected, JsonElement actual) {
    return mismatches(expected, actual, "").isEmpty();
  }

  private static boolean holds(String operator, JsonElement operand, JsonElement actual) {
    switch (operator) {
      case "$min":
        return isNumber(actual) && number(actual).compareTo(number(operand)) >= 0;
      case "$max":
        return isNumber(actual) && number(actual).compareTo(number(operand)) <= 0;
      case "$not":
        return !matches(operand, actual);
      case "$one_of":
        return any(operand, choice -> matches(choice, actual));
      case "$has":
        return isText(actual)
            ? isText(operand) && actual.getAsString().contains(operand.getAsString())
            : actual.isJsonArray() && any(actual, element -> matches(operand, element));
      default:
        throw new Mismatch(operator + " is no operator");
    }
  }

  private static boolean any(JsonElement list, java.util.function.Predicate<JsonElement> isSo) {
    for (JsonElement element : list.getAsJsonArray()) {
      if (isSo.test(element)) {
        return true;
      }
    }
    return false;
  }

  private static boolean isText(JsonElement value) {
    return value.isJsonPrimitive() && value.getAsJsonPrimitive().isString();
  }

  private static boolean isNumber(JsonElement value) {
    return value.isJsonPrimitive() && INTEGER.matcher(value.getAsString()).matches();
  }

  private static BigInteger number(JsonElement value) {
    return new BigInteger(value.getAsString());
  }

  private static boolean equal(JsonElement expected, JsonElement actual) {
    return isNumber(expected)
        ? isNumber(actual) && number(expected).equals(number(actual))
        : expected.equals(actual);
  }

  private static String bare(JsonElement value) {
    return isText(value) ? value.getAsString() : value.toString();
  }

  /** Says that a step of a script does not hold. */
  static final class Mismatch extends RuntimeException {
    private static final long serialVersionUID = 1;

    Mismatch(String why) {
      super(why);
    }
  }
}
