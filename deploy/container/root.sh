# Copies the packages that Python needs out of a Debian into FOLDER: sh root.sh FOLDER
set -eu
folder=$1
packages="base-files libbz2-1.0 libc6 libcrypt1 libexpat1 libffi8 libgcc-s1 liblzma5
    libpython3.11-minimal libpython3.11-stdlib libsqlite3-0 libssl3 libstdc++6 libuuid1 media-types
    netbase python3.11-minimal tini zlib1g"
mkdir -p "$folder/var/lib/dpkg/status.d"
# /lib and its like are links to folders of /usr, and belong to no package.
for link in bin lib lib64 sbin; do
    test ! -L "/$link" || { mkdir -p "$folder/usr/$link"; cp -a "/$link" "$folder/"; }
done
for package in $packages; do
    dpkg-query --listfiles "$package" | while read -r path; do
        case $path in
            /usr/share/doc/*/copyright) ;;
            /usr/share/doc/* | /usr/share/lintian/* | /usr/share/locale/* | /usr/share/man/*)
                continue
                ;;
        esac
        if test -L "$path" || test -f "$path"; then
            mkdir -p "$folder$(dirname "$path")"
            test -e "$folder$path" || cp -a "$path" "$folder$path"
        elif test -d "$path"; then
            mkdir -p "$folder$path"
        fi
    done
    # Scanners of images look here for what is installed.
    dpkg-query --status "$package" > "$folder/var/lib/dpkg/status.d/$package"
done
echo 'root:x:0:0::/root:/usr/sbin/nologin' > "$folder/etc/passwd"
echo 'schedsvc:x:65532:65532::/var/lib/schedsvc:/usr/sbin/nologin' >> "$folder/etc/passwd"
printf 'root:x:0:\nschedsvc:x:65532:\n' > "$folder/etc/group"
install -d -m 1777 "$folder/tmp"
install -d -o 65532 -g 65532 -m 0700 "$folder/var/lib/schedsvc"
install -d -o 65532 -g 65532 -m 0700 "$folder/var/lib/schedsvc-tokens"
install -d -o 65532 -g 65532 -m 0755 "$folder/run/schedsvc"
install -D -m 0644 /build/schedsvc.yaml "$folder/etc/schedsvc/schedsvc.yaml"
# The root is read-only, so Python could not keep what it compiles. A hash instead of a time,
# because copying a layer may change times; unchecked, because nothing changes the sources.
python3.11 -m compileall -q -j 0 --invalidation-mode unchecked-hash \
    -s "$folder" -p / "$folder/usr/lib/python3.11"
