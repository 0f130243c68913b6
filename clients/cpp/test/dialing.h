#pragma once

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

#include <schedsvc/scheduler.h>

namespace dialing {

inline std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// Returns the token in SCHEDSVC_TOKEN, and TLS if SCHEDSVC_TLS_CA_FILE is set.
inline schedsvc::Options options() {
  schedsvc::Options options;
  options.token = variable("SCHEDSVC_TOKEN");
  if (const std::string path = variable("SCHEDSVC_TLS_CA_FILE"); !path.empty()) {
    std::ifstream file(path);
    grpc::SslCredentialsOptions tls;
    tls.pem_root_certs.assign(std::istreambuf_iterator<char>(file), {});
    options.credentials = grpc::SslCredentials(tls);
  }
  return options;
}

}  // namespace dialing
