"""Access to an S3 bucket: the user's options, credentials, the server's address. Runs in drivers and in ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flytekitplugins.daskpytorch.rank.quick_s3 import for_obstore

STORAGE_OPTIONS = ("key", "secret", "token", "profile", "anon", "endpoint_url", "region_name")
"""Names that the argument `storage_options` may have, as in s3fs."""
CREDENTIALS = (
    "Check the credentials: environment variables, profile, or the pod's role. anon=True reads a public bucket"
)


@dataclass(frozen=True, kw_only=True)
class Access:
    """Credentials, server address and timeouts for a bucket. Can be pickled, unlike clients of the bucket."""

    anon: bool = False
    key: str | None = field(default=None, repr=False)
    """Id of the access key. None: the key that AWS's provider chain finds, such as in the environment or a profile."""
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    profile: str | None = None
    """Name of a profile in `~/.aws/config`. None: the profile that `AWS_PROFILE` names, else the default profile."""
    endpoint_url: str | None = None
    """URL of the S3 server. None: the URL in the environment or the profile, else that of AWS."""
    region: str | None = None
    """AWS region of the bucket. None: the region in the environment or the profile, else us-east-1."""
    num_connections: int = 32
    timeout: float = 30.0
    """Timeout, in seconds, for the server's answer to a request."""
    num_retries: int = 5

    def session(self) -> Any:
        """Return a botocore session with these credentials.

        Raises:
            ValueError: The profile does not exist.
        """
        import botocore.session
        from botocore.exceptions import ProfileNotFound

        session = botocore.session.Session(profile=self.profile)
        try:
            session.get_scoped_config()
        except ProfileNotFound as error:
            raise ValueError(
                f"{error}: add the profile to ~/.aws/config, or name another (profile, AWS_PROFILE)"
            ) from None
        # The parsing of timestamps takes two thirds of a long listing's time. Botocore's credentials take texts, too.
        session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
        if self.key is not None:
            session.set_credentials(self.key, self.secret, self.token)
        if not self.anon:
            session.get_credentials()
        return session

    def client(self, session: Any) -> Any:
        """Return a new botocore client for this process. With servers other than AWS, the bucket is in the path."""
        from botocore import UNSIGNED
        from botocore.config import Config

        config = Config(
            connect_timeout=self.timeout,
            read_timeout=self.timeout,
            max_pool_connections=self.num_connections,
            retries={"total_max_attempts": 1 + self.num_retries, "mode": "standard"},
            signature_version=UNSIGNED if self.anon else None,
        )
        region = self.region or session.get_config_variable("region") or "us-east-1"
        return session.create_client("s3", endpoint_url=self.endpoint_url, region_name=region, config=config)


def credentials(session: Any) -> Any:
    """Return a credential provider for obstore with the credentials that a botocore session finds and renews."""
    found = session.get_credentials()
    if found is None:
        raise PermissionError(f"there are no AWS credentials to sign requests with. {CREDENTIALS}")

    return lambda: for_obstore(found.get_frozen_credentials())


def split_uri(s3_bucket: str, s3_prefix: str) -> tuple[str, str]:
    """Return bucket and prefix of a bucket's name, or of a URI that has both.

    Raises:
        ValueError: The bucket's name is malformed, or the prefix is given twice.
    """
    bucket, prefix = s3_bucket, s3_prefix
    if "://" in s3_bucket:
        scheme, _, rest = s3_bucket.partition("://")
        bucket, _, inner = rest.partition("/")
        if scheme not in ("s3", "s3a"):
            raise ValueError(f"s3_bucket={s3_bucket!r}: must be a bucket's name or s3://bucket/prefix")
        if inner.strip("/") and s3_prefix.strip("/"):
            raise ValueError(f"s3_bucket={s3_bucket!r} and s3_prefix={s3_prefix!r}: name the prefix once")
        prefix = inner or s3_prefix
    if not bucket or "/" in bucket:
        raise ValueError(f"s3_bucket={s3_bucket!r}: must be a bucket's name or s3://bucket/prefix")
    return bucket, prefix.strip("/")


def access_options(options: Mapping[str, Any], *, anon: bool) -> dict[str, Any]:
    """Convert options of s3fs to the arguments of `Access`. `anon` wins over the options."""
    if unknown := options.keys() - set(STORAGE_OPTIONS):
        names = ", ".join(sorted(unknown))
        raise ValueError(f"storage_options has {names}, which is unknown. Known are {', '.join(STORAGE_OPTIONS)}")
    if (options.get("key") is None) != (options.get("secret") is None):
        has, lacks = ("secret", "key") if options.get("key") is None else ("key", "secret")
        raise ValueError(
            f"storage_options has {has}, but no {lacks}: give both, or neither to use the environment's credentials"
        )
    named = {"region" if name == "region_name" else name: value for name, value in options.items()}
    return named | {"anon": anon or bool(options.get("anon"))}
