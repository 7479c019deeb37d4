#!/bin/sh
# Sees to it that there is a Java for Spark: 17 or newer. As root on Debian and its kin it installs
# one; elsewhere it says what to do, and ends with code 1.
set -u

new_enough() {
    # openjdk version "17.0.15" 2025-04-15; before 9 the number began with "1.".
    major=$("$1" -version 2>&1 | sed -n 's/^.* version "\([0-9]*\).*/\1/p' | head -n 1)
    [ "${major:-0}" -ge 17 ]
}

# As Spark does: JAVA_HOME first, and the PATH only without it.
java=${JAVA_HOME:+$JAVA_HOME/bin/}java
if new_enough "$java"; then
    exit 0
fi

if [ -z "${JAVA_HOME:-}" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "Installing a Java for Spark; this is done once."
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q >/dev/null 2>&1
    for package in openjdk-17-jre-headless default-jre-headless; do
        if apt-get install -qy --no-install-recommends "$package" >/dev/null 2>&1 && new_enough java
        then
            exit 0
        fi
    done
fi

echo "Spark needs Java 17 or newer: install one (openjdk-17-jre-headless on Debian), and say where" \
    "it is with JAVA_HOME if it is not on the PATH." >&2
exit 1
