package io.github.schedsvc.client.tool;

import io.github.schedsvc.client.Scheduler;
import io.grpc.ChannelCredentials;
import io.grpc.ClientInterceptor;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.TlsChannelCredentials;
import java.io.File;
import java.io.IOException;

/** Makes clients of test programs, as the environment says. */
public final class Dialing {
  private Dialing() {}

  /** Takes the token in SCHEDSVC_TOKEN, and TLS if SCHEDSVC_TLS_CA_FILE is set. */
  public static Scheduler.Builder builder(String target, ClientInterceptor... interceptors)
      throws IOException {
    String authority = System.getenv().getOrDefault("SCHEDSVC_TLS_CA_FILE", "");
    ChannelCredentials credentials =
        authority.isEmpty()
            ? InsecureChannelCredentials.create()
            : TlsChannelCredentials.newBuilder().trustManager(new File(authority)).build();
    Scheduler.Builder builder =
        Scheduler.builder(target)
            .connect(each -> Grpc.newChannelBuilder(each, credentials).intercept(interceptors));
    String token = System.getenv().getOrDefault("SCHEDSVC_TOKEN", "");
    return token.isEmpty() ? builder : builder.token(token);
  }
}
