#pragma once

#include <optional>
#include <string>

#include <nlohmann/json.hpp>

namespace conformance {

using nlohmann::json;
/// Is a number of any 64-bit type.
using Number = __int128;

/// Puts saved values in the place of "$name", and writes repetitions out. Throws if there is none.
json fill(const json& value, const json& saved);

/// Follows a path such as "leases[0].state".
json look_up(json value, const std::string& path);

/// Returns the differences, a sentence each; empty if it matches.
std::string mismatches(const json& expected, const json& actual, const std::string& path = "");

std::optional<Number> number(const json& value);

}  // namespace conformance
