# Installs packages from /build/wheels alone, by pip's own wheel: the builder has no other pip.
#   sh install.sh scheduler REQUIREMENT   into the environment /opt/schedsvc
#   sh install.sh gate REQUIREMENT...     into the folder /opt/gate, without what they require
set -eu
kind=$1
shift
pip() {
    python3.11 "$(echo /build/wheels/pip-*.whl)/pip" --python "$python" install --quiet --no-index \
        --no-compile --no-cache-dir --find-links /build/wheels "$@"
}
case $kind in
    scheduler)
        python=/opt/schedsvc
        python3.11 -m venv --without-pip /opt/schedsvc
        pip "$@"
        # rich imports pygments only to colour source code.
        python3.11 -m compileall -q -j 0 -x /pygments/ --invalidation-mode unchecked-hash \
            /opt/schedsvc/lib
        ;;
    gate)
        python=/usr/bin/python3.11
        # An engine has another Python, so nothing is compiled here.
        pip --no-deps --target /opt/gate "$@"
        ;;
esac
