#!/bin/sh
# Makes the certificates of the tests anew: two workers of one authority, one that has expired, and one of another authority.
set -eu
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
names='subjectAltName=DNS:baton,DNS:localhost,IP:127.0.0.1,IP:::1
extendedKeyUsage=serverAuth,clientAuth
keyUsage=digitalSignature
basicConstraints=CA:FALSE'
printf '%s\n' "$names" > "$work/ext"
key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2> /dev/null; }
authority() {
    key "$work/$1.key"
    openssl req -x509 -new -key "$work/$1.key" -subj "/CN=$1" -days 36500 -out "$1.pem" \
        -addext keyUsage=critical,keyCertSign -addext basicConstraints=critical,CA:TRUE
}
# name, authority, first and last day
certificate() {
    key "$1.key"
    openssl req -new -key "$1.key" -subj "/CN=$1" -out "$work/$1.csr"
    : > "$work/index"
    printf '[ca]\ndefault_ca=it\n[it]\ndatabase=%s\nnew_certs_dir=%s\nrand_serial=yes\ndefault_md=sha256\npolicy=any\n[any]\ncommonName=supplied\n' \
        "$work/index" "$work" > "$work/ca.cnf"
    openssl ca -batch -notext -config "$work/ca.cnf" -cert "$2.pem" -keyfile "$work/$2.key" -extfile "$work/ext" \
        -startdate "$3" -enddate "$4" -in "$work/$1.csr" -out "$1.pem" 2> /dev/null
}
authority ca
authority other-ca
certificate a ca 20260101000000Z 21260101000000Z
certificate b ca 20260101000000Z 21260101000000Z
certificate expired ca 20200101000000Z 20210101000000Z
certificate foreign other-ca 20260101000000Z 21260101000000Z
