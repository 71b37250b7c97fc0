# Sourced by scripts that install the libraries which fabrics are made of. Their versions are in constraints.txt.
# shellcheck shell=bash
# Their own dependencies are for GPUs (gigabytes of them); the engines load without.
FABRIC_WHEELS=(nixl-cu13 mooncake-transfer-engine-non-cuda)
# What Mooncake's engine links with.
FABRIC_DEBIAN=(libibverbs1 librdmacm1 ibverbs-providers libnuma1)

fabric_versions() { grep -E '^(nixl|mooncake|numpy)' constraints.txt; }

# install_fabric_wheels PYTHON: each wheel by itself; says which could not be installed. False if one could not.
install_fabric_wheels() {
    local wheel failed=0
    for wheel in "${FABRIC_WHEELS[@]}"; do
        "$1" -m pip --disable-pip-version-check install -q --no-deps -c constraints.txt "$wheel" ||
            { say "pip could not install $wheel: it will be absent"; failed=1; }
    done
    return $failed
}

# install_fabric_debian: as root the packages that are missing are installed, else they are named. False if some still are.
install_fabric_debian() {
    local package missing=()
    for package in "${FABRIC_DEBIAN[@]}"; do
        dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    if ! command -v apt-get >/dev/null 2>&1; then
        say "Mooncake's engine links with libibverbs, librdmacm and libnuma; install those of this system"
        return 1
    fi
    if [ "$(id -u)" != 0 ]; then
        say "Mooncake's engine links with packages that are missing; install them: sudo apt-get install ${missing[*]}"
        return 1
    fi
    say "installing ${missing[*]} (Mooncake's engine links with them)"
    { apt-get install -y -q "${missing[@]}" || { apt-get update -q && apt-get install -y -q "${missing[@]}"; }; } >/dev/null 2>&1 ||
        { say "apt-get could not install ${missing[*]}: Mooncake will be absent"; return 1; }
}
