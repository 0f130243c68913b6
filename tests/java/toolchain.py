"""Builds the Java client by Maven from a local repository of Debian's packages, with no network."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.box.tools import IN_CI, need

FOLDER = Path(__file__).resolve().parents[2] / "clients/java"
#: Where Debian's packages lib*-java put their artifacts, in the form of a local repository.
PACKAGES = Path("/usr/share/maven-repo")
#: A local repository that has these, and the client.
REPOSITORY = FOLDER / "target/repository"
#: Artifacts that the pom asks for, each with the package that has it.
ARTIFACTS = {
    "io/grpc/grpc-netty": "libgrpc-java",
    "io/netty/netty-codec-http2": "libnetty-java",
    "io/netty/netty-tcnative": "libnetty-tcnative-java",
    "io/perfmark/perfmark-api": "libperfmark-java",
    "com/google/api/grpc/proto-google-common-protos": "libgoogle-common-protos-java",
    "com/google/code/gson/gson": "libgoogle-gson-java",
    "com/google/protobuf/protobuf-java-util": "libprotobuf-java",
    "org/apache/geronimo/specs/geronimo-annotation_1.3_spec": (
        "libgeronimo-annotation-1.3-spec-java"
    ),
    "org/apache/maven/plugins/maven-compiler-plugin": "libmaven-compiler-plugin-java",
    "org/apache/maven/plugins/maven-install-plugin": "libmaven-install-plugin-java",
    "org/apache/maven/plugins/maven-jar-plugin": "libmaven-jar-plugin-java",
    "org/apache/maven/plugins/maven-resources-plugin": "libmaven-resources-plugin-java",
    "org/apache/maven/plugins/maven-surefire-plugin": "libsurefire-java",
    "org/apache/tomcat/embed/tomcat-embed-core": "libtomcat10-embed-java",
    "org/apache/tomcat/tomcat-annotations-api": "libtomcat10-java",
    "org/codehaus/mojo/animal-sniffer-annotations": "libanimal-sniffer-java",
    "org/codehaus/mojo/build-helper-maven-plugin": "libbuild-helper-maven-plugin-java",
    "org/codehaus/mojo/exec-maven-plugin": "libexec-maven-plugin-java",
    "org/junit/jupiter/junit-jupiter": "junit5",
}
#: Debian has a release of Surefire that Maven Central lacks.
SUREFIRE = "-Dsurefire.version=2.22.3"
_PLAIN = ("--batch-mode", "--offline")


#: Debian's Netty makes TLS for HTTP/2 by OpenSSL alone, and looks for this library under this name.
OPENSSL = Path("/usr/lib/x86_64-linux-gnu/jni/libnetty-tcnative.so")
_OPENSSL_NAME = "libnetty_tcnative.so"


def need_java() -> None:
    """Skip the test that calls this without Java and Debian's packages; in CI fail instead."""
    need("java", "javac", "mvn", "protoc", "grpc_java_plugin")
    missing = sorted({name for path, name in ARTIFACTS.items() if not (PACKAGES / path).is_dir()})
    missing += [] if OPENSSL.exists() else ["libnetty-tcnative-jni"]
    if missing:
        text = f"some packages are missing; `.ci/tools {' '.join(missing)}` installs them"
        (pytest.fail if IN_CI else pytest.skip)(text)


def run(
    command: Sequence[object], variables: Mapping[str, str] | None = None, cwd: Path = FOLDER
) -> str:
    """Run a command that has to succeed; return what it prints on stdout."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, **(variables or {})},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(words)}:\n{done.stdout}{done.stderr}"
    return done.stdout


def maven(
    *arguments: object, variables: Mapping[str, str] | None = None, cwd: Path = FOLDER
) -> str:
    """Run Maven, which finds everything in the local repository."""
    local = f"-Dmaven.repo.local={REPOSITORY}"
    return run(["mvn", *_PLAIN, local, SUREFIRE, *arguments], variables, cwd)


def build() -> None:
    """Install the client into a new local repository, and compile its tests."""
    shutil.rmtree(REPOSITORY, ignore_errors=True)
    shutil.copytree(PACKAGES, REPOSITORY, copy_function=os.symlink)
    maven("-q", "install", "-DskipTests")
    native = FOLDER / "target/native"
    native.mkdir(exist_ok=True)
    shutil.copy(OPENSSL, native / _OPENSSL_NAME)


def openssl() -> tuple[str, str]:
    """Return the JAR of Netty's OpenSSL, and the option of Java that finds its library."""
    jar = REPOSITORY / "io/netty/netty-tcnative/debian/netty-tcnative-debian.jar"
    return str(jar), f"-Djava.library.path={FOLDER / 'target/native'}"


def junit(tests: str, variables: Mapping[str, str] | None = None) -> str:
    """Run tests of the client that have to pass; return what Maven prints."""
    jar, option = openssl()
    more = [f"-Dmaven.test.additionalClasspath={jar}", f"-DargLine={option}"]
    return maven("surefire:test", f"-Dtest={tests}", *more, variables=variables)


def class_path(folder: Path, scope: str = "test") -> str:
    """Return the class path of a project that was built."""
    written = folder / "target/class_path.txt"
    echo = ["-Dexec.executable=echo", "-Dexec.args=%classpath", f"-Dexec.classpathScope={scope}"]
    maven(
        "org.codehaus.mojo:exec-maven-plugin:3.1.0:exec",
        *echo,
        f"-Dexec.outputFile={written}",
        cwd=folder,
    )
    return written.read_text().strip()
