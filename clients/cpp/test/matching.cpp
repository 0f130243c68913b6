#include "matching.h"

#include <algorithm>
#include <functional>
#include <regex>
#include <stdexcept>

namespace conformance {
namespace {

std::string said(const json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

json repeated(const json& element, const json& times, const json& saved) {
  const auto count = number(times).value();
  std::string text;
  json copies = json::array();
  for (Number at = 0; at < count; ++at) {
    if (element.is_string()) {
      text += element.get<std::string>();
    } else {
      copies.push_back(fill(element, saved));
    }
  }
  return element.is_string() ? json(text) : copies;
}

template <class List>
bool any(const List& choices, const std::function<bool(const json&)>& matches) {
  return std::any_of(choices.begin(), choices.end(), matches);
}

bool operate(const std::string& name, const json& operand, const json& actual) {
  if (name == "$min" || name == "$max") {
    const auto found = number(actual);
    const auto bound = number(operand).value();
    return found && (name == "$min" ? *found >= bound : *found <= bound);
  }
  if (name == "$one_of") {
    return any(operand, [&](const json& each) { return mismatches(each, actual).empty(); });
  }
  if (name == "$not") {
    return !mismatches(operand, actual).empty();
  }
  if (name == "$has") {
    if (actual.is_string()) {
      return operand.is_string() &&
             actual.get<std::string>().find(operand.get<std::string>()) != std::string::npos;
    }
    return actual.is_array() &&
           any(actual, [&](const json& each) { return mismatches(operand, each).empty(); });
  }
  throw std::invalid_argument(name + " is no operator");
}

void add(std::string& found, const std::string& more) {
  found += (found.empty() || more.empty() ? "" : "; ") + more;
}

std::string in_object(const json& expected, const json& actual, const std::string& path) {
  std::string found;
  bool is_operator = false;
  for (const auto& [key, operand] : expected.items()) {
    if (key.front() == '$') {
      is_operator = true;
      if (!operate(key, operand, actual)) {
        add(found, path + " is " + said(actual) + ", which fails " + key + " " + said(operand));
      }
    }
  }
  if (is_operator) {
    return found;
  }
  if (!actual.is_object()) {
    return path + " is " + said(actual) + ", not an object";
  }
  for (const auto& [key, element] : expected.items()) {
    const std::string below = path.empty() ? key : path + "." + key;
    add(found, mismatches(element, actual.value(key, json()), below));
  }
  return found;
}

}  // namespace

json fill(const json& value, const json& saved) {
  if (value.is_string() && value.get<std::string>().rfind('$', 0) == 0) {
    const auto found = saved.find(value.get<std::string>().substr(1));
    if (found == saved.end()) {
      throw std::invalid_argument("nothing was saved as " + value.get<std::string>());
    }
    return *found;
  }
  if (const auto repeat = value.find("$repeat"); repeat != value.end()) {
    return repeated(repeat->at(0), repeat->at(1), saved);
  }
  json filled = value;
  if (value.is_structured()) {
    for (json& element : filled) {
      element = fill(element, saved);
    }
  }
  return filled;
}

json look_up(json value, const std::string& path) {
  static const std::regex kPart(R"(\w+)");
  for (std::sregex_iterator part(path.begin(), path.end(), kPart), end; part != end; ++part) {
    const std::string name = part->str();
    value = json(value.is_array() ? value.at(std::stoul(name)) : value.at(name));
  }
  return value;
}

std::string mismatches(const json& expected, const json& actual, const std::string& path) {
  if (expected.is_object()) {
    return in_object(expected, actual, path);
  }
  std::string found;
  if (expected.is_array()) {
    if (!actual.is_array() || actual.size() != expected.size()) {
      return path + " is " + said(actual) + ", not a list of " + std::to_string(expected.size());
    }
    for (std::size_t at = 0; at < expected.size(); ++at) {
      add(found, mismatches(expected[at], actual[at], path + "[" + std::to_string(at) + "]"));
    }
    return found;
  }
  const auto wanted = number(expected);
  const bool is_equal = wanted ? wanted == number(actual) : expected == actual;
  return is_equal ? "" : path + " is " + said(actual) + ", not " + said(expected);
}

std::optional<Number> number(const json& value) {
  static const std::regex kInteger(R"(-?\d{1,30})");
  const std::string text = said(value);
  if (!(value.is_number() || value.is_string()) || !std::regex_match(text, kInteger)) {
    return std::nullopt;
  }
  Number found = 0;
  for (const char digit : text) {
    found = digit == '-' ? found : 10 * found + (digit - '0');
  }
  return text.front() == '-' ? -found : found;
}

}  // namespace conformance
