package io.github.schedsvc.client.tool;

import io.github.schedsvc.client.Scheduler;
import io.grpc.TlsChannelCredentials;
import java.io.File;
import java.io.IOException;

/** Makes clients of test programs, as the environment says. */
public final class Dialing {
  private Dialing() {}

  /** Takes the token in SCHEDSVC_TOKEN, and TLS if SCHEDSVC_TLS_CA_FILE is set. */
  public static Scheduler.Builder builder(String target) throws IOException {
    Scheduler.Builder builder = Scheduler.builder(target);
    String token = System.getenv().getOrDefault("SCHEDSVC_TOKEN", "");
    if (!token.isEmpty()) {
      builder.token(token);
    }
    String authority = System.getenv().getOrDefault("SCHEDSVC_TLS_CA_FILE", "");
    if (!authority.isEmpty()) {
      builder.credentials(
          TlsChannelCredentials.newBuilder().trustManager(new File(authority)).build());
    }
    return builder;
  }
}
