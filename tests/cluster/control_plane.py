"""The command lines of etcd and kube-apiserver, the same in both tiers, so that both tiers mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.certificates import Authority, KeyPair

SERVICE_CIDR = "10.199.0.0/16"
# The first address of the Service range always belongs to the Service `kubernetes`.
API_SERVICE_ADDRESS = "10.199.0.1"


@dataclass(frozen=True)
class Pki:
    """The certificates every control plane needs."""

    authority: Authority
    apiserver: KeyPair
    kubelet_client: KeyPair
    admin: KeyPair
    service_accounts: KeyPair


def make_pki(directory: Path, *, hosts: tuple[str, ...]) -> Pki:
    """Issue them; `hosts` are the names and addresses under which the API server is reached."""
    authority = Authority(directory)
    names = (
        "localhost",
        "127.0.0.1",
        "::1",
        API_SERVICE_ADDRESS,
        "kubernetes",
        "kubernetes.default.svc",
        *hosts,
    )
    return Pki(
        authority=authority,
        apiserver=authority.issue("apiserver", "kube-apiserver", hosts=names),
        kubelet_client=authority.issue("kubelet-client", "kube-apiserver", organization="system:masters"),
        admin=authority.issue("admin", "job-reaper-admin", organization="system:masters"),
        service_accounts=authority.signing_key("service-accounts"),
    )


def etcd_argv(program: Path, *, data: Path, address: str, port: int, peer_port: int) -> list[str]:
    """A single etcd. No fsync: the data lives as long as the test, and fsync is most of etcd's time."""
    client, peer = f"http://{address}:{port}", f"http://{address}:{peer_port}"
    return [
        str(program),
        f"--data-dir={data}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def apiserver_argv(
    program: Path,
    pki: Pki,
    *,
    etcd: str,
    bind: str,
    advertise: str,
    port: int,
    certificates: Path,
    extra: Mapping[str, str] | None = None,
) -> list[str]:
    """kube-apiserver with Node and RBAC authorization, and real ServiceAccount tokens.

    Objects are stored as JSON, so that a test can rewrite a stored stamp (see ApiTier.rewrite): a
    deletionTimestamp of ten minutes ago cannot be had through the API in less than ten minutes.
    """
    flags = {
        "etcd-servers": etcd,
        "storage-media-type": "application/json",
        "bind-address": bind,
        "advertise-address": advertise,
        "secure-port": str(port),
        "cert-dir": str(certificates),
        "tls-cert-file": str(pki.apiserver.cert),
        "tls-private-key-file": str(pki.apiserver.key),
        "client-ca-file": str(pki.authority.cert),
        "kubelet-certificate-authority": str(pki.authority.cert),
        "kubelet-client-certificate": str(pki.kubelet_client.cert),
        "kubelet-client-key": str(pki.kubelet_client.key),
        "service-account-issuer": "https://kubernetes.default.svc",
        "service-account-key-file": str(pki.service_accounts.cert),
        "service-account-signing-key-file": str(pki.service_accounts.key),
        "service-cluster-ip-range": SERVICE_CIDR,
        "authorization-mode": "Node,RBAC",
        "enable-admission-plugins": "NodeRestriction",
        "allow-privileged": "true",
        "profiling": "false",
        # A stopped server must go at once; open watches would hold it for a minute.
        "shutdown-delay-duration": "0s",
        "v": "1",
        **(extra or {}),
    }
    return [str(program), *(f"--{key}={value}" for key, value in flags.items())]
