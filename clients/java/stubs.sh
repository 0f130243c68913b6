#!/bin/sh
# Generates the stubs of the contract: stubs.sh PROTO_FOLDER OUT_FOLDER
# protoc comes from the PATH, and so does protoc-gen-grpc-java (Debian calls it grpc_java_plugin).
set -eu
plugin=$(command -v protoc-gen-grpc-java || command -v grpc_java_plugin)
rm -rf "$2"
mkdir -p "$2"
cd "$1"
find schedsvc -name '*.proto' -exec protoc -I. --java_out="$2" --grpc-java_out="$2" \
    --plugin=protoc-gen-grpc-java="$plugin" {} +
