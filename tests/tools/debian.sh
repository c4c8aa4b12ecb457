#!/usr/bin/env bash
# Runs the quick tests on the Python of a Debian suite: tests/tools/debian.sh SUITE FOLDER. FOLDER, relative to the
# checkout, becomes the root of a new Debian with a clone of the checkout. Mounts are made in a namespace of their own.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ "$(id -u)" != 0 ]; then
  exec sudo tests/tools/debian.sh "$@"  # debootstrap and chroot need root
fi
suite=$1
folder=$(realpath --canonicalize-missing "$2")
if ! command -v debootstrap >/dev/null; then
  apt-get update -qq
  apt-get install -y -qq debootstrap debian-archive-keyring
fi
rm -rf "$folder"
mkdir -p "$folder"
debootstrap --variant=minbase "$suite" "$folder" http://deb.debian.org/debian
git -c safe.directory='*' clone --quiet --no-hardlinks . "$folder/checkout"
cp --dereference /etc/ssl/certs/ca-certificates.crt "$folder/host-certificates.crt"
cat > "$folder/run-quick-tests" <<'RUN'
set -euo pipefail
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive
unset PYTHONPATH VIRTUAL_ENV PIP_FIND_LINKS MAKEFLAGS MAKELEVEL  # paths of the host
apt-get install -y -qq --no-install-recommends build-essential git python3-dev python3-venv >/dev/null
cp /host-certificates.crt /etc/ssl/certs/ca-certificates.crt  # a proxy's too
cd /checkout
make test PYTHON=python3 VENV=/venv
/venv/bin/python --version
RUN
exec unshare --mount --pid --fork --kill-child bash -c '
  mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && mount --rbind /sys "$0/sys" && exec chroot "$0" bash /run-quick-tests
' "$folder"
