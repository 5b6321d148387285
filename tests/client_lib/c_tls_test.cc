// Tests TLS through the C interface.
#include <string>

#include "tests/client_lib/c_api_fixture.h"
#include "tests/support/certificates.h"

namespace prefixd::testing {
namespace {

TEST(CTls, AnAddressThatBeginsWithTlsIsConnectedTo) {
  const DaemonDir dir;
  const Authority authority(dir.path());
  authority.Issue("daemon");
  const DaemonProcess daemon(
      dir.path(), {"--listen", "127.0.0.1:0", "--tls-certificate", authority.certificate("daemon"),
                   "--tls-key", authority.key("daemon")});
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  const std::string address = daemon.tcp_address(), ca = authority.ca();
  pfx_connect_options options = PFX_CONNECT_OPTIONS_INIT;
  options.address = address.c_str();
  pfx_store* client = nullptr;
  EXPECT_EQ(pfx_connect(&options, &client), PFX_FAILED_PRECONDITION);
  EXPECT_NE(std::string(pfx_last_error()).find("is not accepted"), std::string::npos)
      << pfx_last_error();
  options.tls_ca = ca.c_str();
  ASSERT_EQ(pfx_connect(&options, &client), PFX_OK) << pfx_last_error();
  char* stats = nullptr;
  EXPECT_EQ(pfx_stats(client, &stats), PFX_OK) << pfx_last_error();
  pfx_free(stats);
  pfx_store_close(client);
}

}  // namespace
}  // namespace prefixd::testing
