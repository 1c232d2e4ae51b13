"""Make the bucket of MLFLOW_ARTIFACTS_DESTINATION, unless it is there: neither MLflow nor DVC does."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import boto3

_DEFAULT_REGION = "us-east-1"


def main() -> None:
    bucket = urlsplit(os.environ["MLFLOW_ARTIFACTS_DESTINATION"]).netloc
    s3 = boto3.client("s3")
    if bucket in [found["Name"] for found in s3.list_buckets()["Buckets"]]:
        return
    region = s3.meta.region_name
    # S3 refuses its default region as a constraint, and needs any other one as such.
    place = {} if region == _DEFAULT_REGION else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    s3.create_bucket(Bucket=bucket, **place)


if __name__ == "__main__":
    main()
